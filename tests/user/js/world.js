/** A random world for a machine: brokers that lag, connections that die, migrations, slow handlers, logs that are trimmed or lost. */

import assert from "node:assert/strict";

import { Driver } from "./driver.js";

const STEPS = 1500;
const URLS = ["ws://a/connect", "ws://b/connect", "ws://c/connect"];
const PUBLISHERS = ["p1", "p2"];

/** A small random number generator (mulberry32), so that a seed replays a world. */
function generator(seed) {
    let state = seed;
    return () => {
        state = (state + 0x6d2b79f5) | 0;
        let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
        mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
        return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
    };
}

/** One connection, on the side of its broker. What either side sends is in a queue until the world delivers it. */
class BrokerConnection {
    constructor(world) {
        this.world = world;
        this.to_broker = [];
        this.to_client = [];
        this.cursors = new Map();
        this.is_open = false;
    }

    take(frame) {
        if (frame.type === "connect") this.onConnect(frame);
        else if (frame.type === "subscribe") this.onSubscribe(frame);
        else if (frame.type === "unsubscribe") this.onUnsubscribe(frame.s);
        else if (frame.type === "leave") this.onLeave();
        else if (frame.type === "publish") this.onPublish(frame);
        else this.onAck(frame);
    }

    onAck({ type, p }) {
        assert.equal(type, "ack");
        for (const [channel, position] of Object.entries(p)) {
            const stored = this.world.storedPosition(channel);
            const is_present = position.epoch === this.world.log(channel).epoch;
            if (!is_present || (stored.epoch === position.epoch && stored.offset >= position.offset)) continue;
            this.world.stored.set(channel, position);
        }
    }

    onConnect({ subs }) {
        this.send("connected", { session: "s1", broker: "b", alternates: URLS, ping_s: 20, ack_s: 1 });
        for (const sub of subs) this.onSubscribe(sub);
        this.send("moved_in");
    }

    onSubscribe({ ref, channel, since }) {
        if (channel.startsWith("live")) {
            this.cursors.set(channel, this.world.live.length);
            this.send("subscribed", { ref, s: channel, live: true });
            return;
        }
        const log = this.world.log(channel);
        if (since === "stored") since = this.world.storedPosition(channel);
        const begin = since === "new" ? log.count : since.offset;
        const recovered = since === "new" || (since.epoch === log.epoch && since.offset >= log.trimmed);
        const offset = recovered ? begin : log.trimmed;
        this.send("subscribed", { ref, s: channel, epoch: log.epoch, offset, recovered });
        this.cursors.set(channel, { epoch: log.epoch, offset });
        if (!recovered) this.sendGap(channel, since.epoch === log.epoch ? since.offset + 1 : 1, log);
    }

    sendGap(channel, from, log) {
        const { epoch, trimmed } = log;
        this.send("gap", { s: channel, reason: "trimmed", from, to: trimmed, epoch, offset: trimmed });
    }

    onUnsubscribe(s) {
        this.cursors.delete(s);
        this.send("unsubscribed", { s });
    }

    onLeave() {
        for (const channel of this.cursors.keys()) while (this.sendNext(channel)) {}
        this.send("bye", { p: {} });
    }

    onPublish({ ref, channel }) {
        if (this.world.random() < 0.1) {
            this.send("error", { ref, code: "forbidden", message: "", retry: "never" });
            return;
        }
        const log = this.world.log(channel);
        log.count += 1;
        this.send("published", { ref, epoch: log.epoch, offset: log.count });
    }

    /** Queue the next publication of an interest; returns whether there was one. */
    sendNext(channel) {
        const cursor = this.cursors.get(channel);
        if (channel.startsWith("live")) return this.sendNextLive(channel, cursor);
        const log = this.world.log(channel);
        if (cursor.epoch !== log.epoch || cursor.offset < log.trimmed) {
            const from = cursor.epoch === log.epoch ? cursor.offset + 1 : 1;
            this.cursors.set(channel, { epoch: log.epoch, offset: log.trimmed });
            this.sendGap(channel, from, log);
            return true;
        }
        if (cursor.offset === log.count) return false;
        cursor.offset += 1;
        this.send("data", { s: channel, o: cursor.offset, d: `${log.epoch} ${cursor.offset}` });
        return true;
    }

    sendNextLive(channel, cursor) {
        if (cursor === this.world.live.length) return false;
        const [publisher, number] = this.world.live[cursor];
        this.cursors.set(channel, cursor + 1);
        this.send("data", { s: channel, d: `${publisher} ${number}`, p: [publisher, number] });
        return true;
    }

    send(type, fields = {}) {
        this.to_client.push({ type, ...fields });
    }
}

export class World {
    constructor(seed) {
        this.random = generator(seed);
        /** In a calm world connections only end by migrations. */
        this.is_calm = seed % 2 === 0;
        this.driver = new Driver({ urls: URLS, queue_max: 1 + this.pick(8) });
        this.driver.finishes = false;
        this.connections = new Map();
        this.logs = new Map();
        /** The positions that brokers keep. */
        this.stored = new Map();
        this.live = [];
        this.numbers = new Map(PUBLISHERS.map((publisher) => [publisher, 0]));
        this.timers = new Set();
        this.busy = new Set();
        this.lost = 0;
        this.moved = 0;
        this.channels = ["log1", "log2", "live"];
        /** The present subscription of each channel, and all that ever were, with their channel. */
        this.present = new Map();
        this.subscriptions = [];
        /** Publications of the client without an outcome. */
        this.publishing = new Set();
        this.ids = 0;
        this.do("start");
        for (const channel of this.channels) this.subscribe(channel);
    }

    pick(count) {
        return Math.floor(this.random() * count);
    }

    one(items) {
        const list = [...items];
        return list[this.pick(list.length)];
    }

    log(channel) {
        if (!this.logs.has(channel)) this.logs.set(channel, { epoch: "epoch0", count: 0, trimmed: 0, lives: 0 });
        return this.logs.get(channel);
    }

    storedPosition(channel) {
        const { epoch, count } = this.log(channel);
        if (!this.stored.has(channel)) this.stored.set(channel, { epoch, offset: count });
        return this.stored.get(channel);
    }

    do(type, fields) {
        for (const action of this.driver.do(type, fields)) {
            if (action.type === "open") this.connections.set(action.conn, new BrokerConnection(this));
            if (action.type === "send") this.onSent(action);
            if (action.type === "close") this.connections.delete(action.conn);
            if (action.type === "set_timer") this.timers.add(action.timer);
            if (action.type === "clear_timer") this.timers.delete(action.timer);
            if (action.type === "hand_over") this.busy.add(action.sub);
            if (action.type === "moved") this.moved += 1;
            if (action.type === "published" || action.type === "publish_failed") {
                assert.ok(this.publishing.delete(action.id), "one outcome");
            }
            assert.notEqual(action.type, "error", JSON.stringify(action));
        }
    }

    onSent({ conn, frame }) {
        this.connections.get(conn).to_broker.push(frame);
        for (const [s, position] of Object.entries(frame.type === "ack" ? frame.p : {})) {
            const handled = this.driver.machine.position(this.present.get(s));
            if (handled !== null) assert.deepEqual(position, handled, "acks are handled"); // null: it has just ended.
        }
    }

    subscribe(channel) {
        const sub = (this.ids += 1);
        this.present.set(channel, sub);
        this.subscriptions.push([sub, channel]);
        this.do("subscribe", { sub, channel, ...(channel === "log2" ? { stored: true } : {}) });
    }

    unsubscribe() {
        const channel = this.one(this.channels);
        const sub = this.present.get(channel);
        this.busy.delete(sub);
        this.do("unsubscribe", { sub });
        this.subscribe(channel);
    }

    publishHere() {
        const id = (this.ids += 1);
        this.publishing.add(id);
        this.do("publish", { id, channel: "log1", d: "" });
    }

    publish() {
        const channel = this.one(this.channels);
        if (channel !== "live") {
            this.log(channel).count += 1;
            return;
        }
        const publisher = this.one(PUBLISHERS);
        this.numbers.set(publisher, this.numbers.get(publisher) + 1);
        this.live.push([publisher, this.numbers.get(publisher)]);
    }

    /** Let one connection go on by a bit. Returns whether there was anything to do. */
    advance(id) {
        const connection = this.connections.get(id);
        if (!connection) return false;
        if (!connection.is_open) {
            connection.is_open = true;
            this.do("opened", { conn: id });
            return true;
        }
        const choices = [];
        if (connection.to_broker.length) choices.push(() => connection.take(connection.to_broker.shift()));
        // Frames arrive faster than brokers send them, or queues would grow for ever.
        for (let weight = 0; weight < Math.min(connection.to_client.length, 6); weight += 1) {
            choices.push(() => this.do("frame", { conn: id, frame: connection.to_client.shift() }));
        }
        for (const channel of connection.cursors.keys()) choices.push(() => connection.sendNext(channel));
        const before = this.progress();
        if (choices.length) this.one(choices)();
        return this.progress() !== before;
    }

    progress() {
        const queues = [...this.connections.values()].flatMap(({ to_broker, to_client }) => [to_broker, to_client]);
        return JSON.stringify([queues.map(({ length }) => length), this.driver.actions.length]);
    }

    handled() {
        const sub = this.one(this.busy);
        if (sub === undefined) return;
        this.busy.delete(sub);
        this.do("handled", { sub });
    }

    fire(timer) {
        if (timer === undefined) return;
        const is_failure = /^(silence|opening|bye|move_deadline)/.test(timer);
        if (is_failure && (this.is_calm || this.random() < 0.9)) return;
        this.timers.delete(timer);
        if (timer === "bye") this.lost += 1;
        this.driver.now += timer.startsWith("silence") || timer.startsWith("opening") ? 0 : 0.1;
        this.do("timer", { timer });
    }

    kill(id) {
        if (this.is_calm || !this.connections.delete(id)) return;
        this.lost += 1;
        this.do("closed", { conn: id, code: this.one([1001, 1006, 1012, 4003]) });
    }

    move() {
        const connection = this.connections.get(this.driver.machine.current);
        if (connection?.cursors.size) {
            connection.send("move", { to: [this.one(URLS)], within_ms: 0, deadline_ms: 5000 });
        }
    }

    step() {
        const draw = this.random();
        const id = this.one(this.connections.keys());
        if (draw < 0.1) this.publish();
        else if (draw < 0.72) this.advance(id);
        else if (draw < 0.85) this.handled();
        else if (draw < 0.94) this.fire(this.one(this.timers));
        else if (draw < 0.975) this.move();
        else if (draw < 0.985) this.kill(id);
        else if (draw < 0.995) this.trim();
        else if (draw < 0.997) this.loseLog();
        else if (draw < 0.998) this.unsubscribe();
        else this.publishHere();
    }

    trim() {
        const log = this.log(this.one(["log1", "log2"]));
        log.trimmed += this.pick(log.count - log.trimmed + 1);
    }

    loseLog() {
        const channel = this.one(["log1", "log2"]);
        const lives = this.log(channel).lives + 1;
        this.logs.set(channel, { epoch: `epoch${lives}`, count: this.pick(3), trimmed: 0, lives });
    }

    /** Nothing fails any more: let all arrive. */
    settle() {
        for (let round = 0; round < 20_000; round += 1) {
            const has_advanced = [...this.connections.keys()].map((id) => this.advance(id)).some(Boolean);
            const is_busy = this.busy.size > 0;
            this.handled();
            for (const timer of this.timers) if (/^(reconnect|move$|retry)/.test(timer)) this.fire(timer);
            if (!has_advanced && !is_busy && this.isComplete()) return;
        }
        assert.fail("never at rest");
    }

    isComplete() {
        const connections = [...this.connections.values()];
        if (connections.length !== 1) return false;
        const [{ to_broker, to_client, cursors }] = connections;
        return to_broker.length + to_client.length === 0 && cursors.get("live") === this.live.length
            && ["log1", "log2"].every((channel) => {
                const { epoch, count } = this.log(channel);
                return cursors.get(channel)?.epoch === epoch && cursors.get(channel).offset === count;
            });
    }

    check() {
        for (const [sub, channel] of this.subscriptions) {
            if (channel === "live") this.checkLive(sub);
            else this.checkLogged(sub, channel);
        }
        assert.equal(this.publishing.size, 0, "publications have an outcome");
    }

    checkLogged(sub, channel) {
        const log = this.log(channel);
        let last = null;
        for (const item of this.driver.itemsOf(sub)) {
            if (item.epoch === undefined) continue;
            if (item.type === "publication") {
                assert.equal(item.d, `${item.epoch} ${item.offset}`);
                assert.equal(last === null || item.epoch === last.epoch, true, "an epoch begins with a gap");
                if (last) assert.equal(item.offset, last.offset + 1);
            } else if (last && item.epoch === last.epoch) {
                assert.equal(item.from, last.offset + 1);
                if (item.epoch === log.epoch) assert.ok(item.to <= log.trimmed, "only what the log has not is missing");
            }
            last = { epoch: item.epoch, offset: item.offset };
        }
        if (this.present.get(channel) !== sub) return;
        assert.deepEqual(this.driver.machine.position(sub), { epoch: log.epoch, offset: log.count });
    }

    checkLive(sub) {
        const items = this.driver.itemsOf(sub);
        const gaps = new Set(items.filter(({ type }) => type === "gap").map(({ reason }) => reason));
        for (const publisher of PUBLISHERS) {
            let last = null;
            let has_gap = true;
            for (const item of items) {
                if (item.type === "gap") has_gap = true;
                if (item.publisher !== publisher) continue;
                if (last !== null) assert.ok(item.number > last, "each once, in order");
                if (last !== null && !has_gap) assert.equal(item.number, last + 1, "what is missing is a gap");
                last = item.number;
                has_gap = false;
            }
        }
        if (this.lost === 0) assert.ok(!gaps.has("reconnected"), "a migration loses nothing");
    }
}

/** Run a world up to its end; a failure names the seed that replays it. */
export function run(seed) {
    const world = new World(seed);
    try {
        for (let step = 0; step < STEPS; step += 1) world.step();
        world.settle();
        world.check();
    } catch (error) {
        error.message = `seed ${seed}: ${error.message}`;
        throw error;
    }
    return world;
}
