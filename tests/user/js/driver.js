/** Drives a `SessionMachine` in tests: events in, actions out, and the invariants checked after each event. */

import assert from "node:assert/strict";
import { isDeepStrictEqual } from "node:util";

import { SessionMachine } from "../../../user/js/dynamoth.js";

export const EPOCH = "00000000000000aa";
export const LATER_EPOCH = "00000000000000bb";
export const A = "ws://a/connect";
export const B = "ws://b/connect";
export const C = "ws://c/connect";

export class Driver {
    constructor(options = {}) {
        this.options = { session: "s1", urls: [A, B], ...options };
        this.machine = new SessionMachine(this.options);
        this.now = 1000;
        /** All actions since the last `take`. */
        this.actions = [];
        /** All events, with their time and the actions. */
        this.trace = [];
        /** Handlers finish at once, unless a test clears this. */
        this.finishes = true;
        this.handed = new Map();
    }

    /** Handle one event, then finish handlers; returns the actions of all. */
    do(type, fields = {}) {
        const actions = [];
        const events = [{ type, ...fields }];
        while (events.length > 0) {
            const event = events.shift();
            const made = this.machine.handle(event, this.now);
            this.trace.push({ event, now: this.now, actions: made });
            this.machine.check();
            for (const action of made) {
                assert.ok(isDeepStrictEqual(JSON.parse(JSON.stringify(action)), action), `not JSON: ${action.type}`);
                if (action.type !== "hand_over") continue;
                this.itemsOf(action.sub).push(action.item);
                if (this.finishes) events.push({ type: "handled", sub: action.sub });
            }
            actions.push(...made);
        }
        this.actions.push(...actions);
        return actions;
    }

    itemsOf(sub) {
        if (!this.handed.has(sub)) this.handed.set(sub, []);
        return this.handed.get(sub);
    }

    /** What was handed over: offsets, numbers or texts, and the reasons of gaps. */
    seen(sub = 1) {
        return this.itemsOf(sub).map((item) => item.offset !== undefined && item.type === "publication" ? item.offset
            : item.type === "gap" ? `gap:${item.reason}` : item.number ?? item.d);
    }

    wait(seconds) {
        this.now += seconds;
    }

    timer(timer) {
        return this.do("timer", { timer });
    }

    frame(conn, type, fields = {}) {
        return this.do("frame", { conn, frame: { type, ...fields } });
    }

    subscribe(sub, channel, since, options = {}) {
        return this.do("subscribe", { sub, channel, ...(since === undefined ? {} : { since }), ...options });
    }

    /** Open connection `conn` up to `connected`; returns the frame `connect`. */
    open(conn, fields = {}) {
        const [connect] = frames(this.do("opened", { conn }), "connect");
        this.frame(conn, "connected", {
            session: "s1", broker: `broker${conn}`, alternates: [], ping_s: 20, ack_s: 1, ...fields,
        });
        return connect;
    }

    confirmLogged(conn, ref, offset, { s = "S1", epoch = EPOCH, recovered = true } = {}) {
        return this.frame(conn, "subscribed", { ref, s, epoch, offset, recovered });
    }

    confirmLive(conn, ref, s = "S1") {
        return this.frame(conn, "subscribed", { ref, s, live: true });
    }

    data(conn, offset, s = "S1") {
        return this.frame(conn, "data", { s, o: offset, d: `text ${offset}` });
    }

    live(conn, number, publisher = "00000000000000p1", s = "S1") {
        return this.frame(conn, "data", { s, d: `text ${number}`, p: [publisher, number] });
    }

    gap(conn, fields) {
        return this.frame(conn, "gap", { s: "S1", reason: "trimmed", ...fields });
    }

    close(conn, code = 1006) {
        return this.do("closed", { conn, code, reason: "" });
    }

    /** The one timer that was set last under this name, as `[delay_s_min, delay_s_max]`. */
    delay(timer) {
        const set = this.actions.findLast((action) => action.type === "set_timer" && action.timer === timer);
        return set && [set.delay_s_min, set.delay_s_max];
    }
}

/** Frames of one type that were sent, with their connection in `conn` if `with_conn`. */
export function frames(actions, type) {
    return actions.filter((action) => action.type === "send" && action.frame.type === type).map(({ frame }) => frame);
}

export function only(actions, type) {
    return actions.filter((action) => action.type === type);
}

/** A driver that is connected, with a logged subscription 1 of "news" at offset 10. */
export function logged({ stored, ...options } = {}) {
    const driver = new Driver(options);
    driver.do("start");
    driver.subscribe(1, "news", undefined, stored ? { stored } : {});
    driver.open(1);
    driver.confirmLogged(1, 1, 10);
    return driver;
}

/** A driver that is connected, with a live subscription 1 of "news". */
export function live(options) {
    const driver = new Driver(options);
    driver.do("start");
    driver.subscribe(1, "news");
    driver.open(1);
    driver.confirmLive(1, 1);
    return driver;
}

/** Start a migration to connection 2, which is connected and has confirmed subscription 1. */
export function overlap(driver, { recovered = true, offset, to = [C], alternates = [] } = {}) {
    driver.frame(1, "move", { to, ticket: "t", within_ms: 500, deadline_ms: 9000 });
    driver.timer("move");
    const connect = driver.open(2, { alternates });
    const since = connect.subs[0].since;
    if (since === "new") driver.confirmLive(2, connect.subs[0].ref);
    else driver.confirmLogged(2, connect.subs[0].ref, offset ?? since.offset, { recovered });
    return connect;
}
