import assert from "node:assert/strict";
import test from "node:test";

import { A, B, C, EPOCH, LATER_EPOCH, frames, live, logged, only, overlap } from "./driver.js";

const OTHER = "00000000000000p2";

test("a move is begun at random within within_ms, with ticket and positions", () => {
    const driver = logged();
    driver.data(1, 11);
    driver.frame(1, "move", { to: [C, B], ticket: "t", within_ms: 500, deadline_ms: 9000 });
    assert.deepEqual(driver.delay("move"), [0, 0.5]);
    assert.deepEqual(driver.delay("move_deadline"), [9, 9]);
    assert.deepEqual(only(driver.timer("move"), "open"), [{ type: "open", conn: 2, url: C }]);
    const connect = driver.open(2);
    assert.deepEqual([connect.ticket, connect.generation], ["t", 2]);
    assert.deepEqual(connect.subs[0].since, { epoch: EPOCH, offset: 11 });
});

test("a whole migration of a logged interest: frames from both, each offset once", () => {
    const driver = logged({ stored: true });
    overlap(driver);
    driver.data(1, 11);
    driver.data(2, 11);
    driver.data(2, 12);
    driver.data(1, 12);
    assert.deepEqual(driver.seen(), [11, 12]);
    const left = driver.frame(2, "moved_in");
    assert.deepEqual(driver.timer("move_deadline"), []);
    assert.deepEqual(left.filter(({ type }) => type === "send"), [
        { type: "send", conn: 1, frame: { type: "leave" } },
        { type: "send", conn: 2, frame: { type: "ack", p: { S1: { epoch: EPOCH, offset: 12 } } } },
    ]);
    driver.data(1, 13);
    driver.data(2, 13);
    driver.data(2, 14);
    const actions = driver.frame(1, "bye", { p: { S1: 13 } });
    assert.deepEqual(only(actions, "close"), [{ type: "close", conn: 1, code: 1000, reason: "" }]);
    assert.deepEqual(only(actions, "moved"), [{ type: "moved", from: "broker1", to: "broker2" }]);
    driver.data(2, 15);
    assert.deepEqual(driver.seen(), [11, 12, 13, 14, 15]);
    assert.deepEqual(driver.machine.state, "connected");
});

test("a hole of the new connection is closed by the old one, or read again there", () => {
    const driver = logged();
    driver.data(1, 11);
    overlap(driver);
    const actions = driver.data(2, 13);
    assert.deepEqual(only(actions, "send").map(({ conn, frame }) => [conn, frame.type]), [[2, "subscribe"]]);
    driver.data(1, 12);
    driver.data(1, 13);
    assert.deepEqual(driver.seen(), [11, 12, 13]);
});

test("a gap of the new broker about what the old one has delivered is a copy", () => {
    const driver = logged();
    overlap(driver, { recovered: false });
    for (const offset of [11, 12, 13]) driver.data(1, offset);
    driver.gap(2, { from: 11, to: 12, epoch: EPOCH, offset: 12 });
    driver.data(2, 13);
    driver.data(2, 14);
    assert.deepEqual(driver.seen(), [11, 12, 13, 14]);
    driver.gap(2, { from: 13, to: 16, epoch: EPOCH, offset: 16 });
    assert.equal(driver.itemsOf(1).at(-1).from, 15);
});

test("a lost log during a migration: neither frames nor gaps of its former epoch come back", () => {
    const driver = logged();
    overlap(driver);
    driver.gap(2, { epoch: LATER_EPOCH, offset: 0 });
    driver.data(1, 11);
    driver.data(2, 1);
    driver.gap(1, { from: 11, to: 11, epoch: EPOCH, offset: 11 });
    driver.gap(1, { epoch: LATER_EPOCH, offset: 0 });
    driver.data(1, 1);
    driver.data(1, 2);
    driver.data(2, 2);
    assert.deepEqual(driver.seen(), ["gap:trimmed", 1, 2]);
});

test("live: the new connection hands out only what is next of its publisher, and holds the rest until bye", () => {
    const driver = live();
    driver.live(1, 1);
    overlap(driver);
    driver.live(2, 3);
    driver.live(2, 9, OTHER);
    assert.deepEqual(driver.seen(), [1]);
    driver.live(1, 2);
    driver.live(1, 3);
    driver.live(2, 4);
    assert.deepEqual(driver.seen(), [1, 2, 3, 4]);
    driver.live(1, 4);
    assert.deepEqual(driver.seen(), [1, 2, 3, 4]);
    driver.frame(2, "moved_in");
    driver.live(2, 6);
    driver.live(1, 5);
    assert.deepEqual(driver.seen(), [1, 2, 3, 4, 5]);
    driver.frame(1, "bye", { p: {} });
    assert.deepEqual(driver.seen(), [1, 2, 3, 4, 5, 9, 6]);
    driver.live(2, 5);
    driver.live(2, 7);
    assert.deepEqual(driver.seen(), [1, 2, 3, 4, 5, 9, 6, 7]);
});

test("live: of messages without a number, those before leave come from the old broker alone", () => {
    const driver = live();
    overlap(driver);
    const plain = (conn, d) => driver.frame(conn, "data", { s: "S1", d });
    plain(2, "early");
    plain(1, "early");
    driver.frame(2, "moved_in");
    plain(2, "late");
    assert.deepEqual(driver.seen(), ["early"]);
    driver.frame(1, "bye", { p: {} });
    assert.deepEqual(driver.seen(), ["early", "late"]);
});

test("live: a gap of the new broker keeps its place among what is held", () => {
    const driver = live();
    overlap(driver);
    driver.live(2, 5);
    driver.frame(2, "gap", { s: "S1", reason: "overload", count: 2 });
    driver.live(2, 8);
    assert.deepEqual(driver.seen(), []);
    driver.frame(2, "moved_in");
    driver.frame(1, "bye", { p: {} });
    assert.deepEqual(driver.seen(), [5, "gap:overload", 8]);
});

test("live: what is held is bounded, and the rest becomes a gap", () => {
    const driver = live({ queue_max: 5000 });
    overlap(driver);
    for (let number = 1; number <= 1003; number += 1) driver.live(2, number, OTHER);
    driver.frame(2, "moved_in");
    driver.frame(1, "bye", { p: {} });
    assert.equal(driver.itemsOf(1).length, 1001);
    assert.deepEqual(driver.itemsOf(1).at(-1), { type: "gap", reason: "held_full", count: 3 });
});

test("the deadline passes: the client stays, and hands out nothing twice", () => {
    const driver = live();
    overlap(driver);
    driver.live(2, 3);
    const actions = driver.timer("move_deadline");
    assert.deepEqual(only(actions, "close").map(({ conn, code }) => [conn, code]), [[2, 4006]]);
    for (const number of [1, 2, 3, 4]) driver.live(1, number);
    assert.deepEqual(driver.seen(), [1, 2, 3, 4]);
    driver.frame(1, "move", { to: [B], within_ms: 0, deadline_ms: 9000 });
    assert.deepEqual(only(driver.timer("move"), "open"), [{ type: "open", conn: 3, url: B }]);
});

test("the first URL of a move that answers is taken; when none does the client stays", () => {
    const driver = logged();
    driver.frame(1, "move", { to: [C, B], within_ms: 0, deadline_ms: 9000 });
    driver.timer("move");
    assert.deepEqual(only(driver.close(2), "open"), [{ type: "open", conn: 3, url: B }]);
    assert.deepEqual(only(driver.close(3), "open"), []);
    driver.data(1, 11);
    assert.deepEqual(driver.seen(), [11]);
    assert.equal(driver.machine.state, "connected");
});

test("a new broker that refuses, whatever its reason, is left", () => {
    for (const code of [1013, 4001, 4004, 4005, 1006]) {
        const driver = logged();
        overlap(driver, { to: [C, B] });
        const actions = driver.close(2, code);
        assert.deepEqual([...only(actions, "error"), ...only(actions, "open")], []);
        driver.data(1, 11);
        assert.deepEqual([driver.seen(), driver.machine.state], [[11], "connected"]);
    }
    const driver = logged();
    driver.frame(1, "move", { to: [C], within_ms: 0, deadline_ms: 9000 });
    driver.timer("move");
    const { subs } = driver.open(2);
    const error = { code: "forbidden", message: "no", retry: "never", ref: subs[0].ref };
    const actions = driver.frame(2, "error", error);
    assert.deepEqual(only(actions, "close").map(({ conn }) => conn), [2]);
    assert.deepEqual(only(actions, "subscription_failed"), []);
});

test("the old connection is lost before bye: logged interests lose nothing", () => {
    const driver = logged();
    overlap(driver);
    driver.data(1, 11);
    driver.data(2, 11);
    const actions = driver.close(1);
    assert.deepEqual(only(actions, "moved"), [{ type: "moved", from: "broker1", to: "broker2" }]);
    driver.data(2, 12);
    assert.deepEqual(driver.seen(), [11, 12]);
});

test("the old connection is lost before bye: live interests get a gap, then what was held", () => {
    const driver = live();
    driver.live(1, 1);
    overlap(driver);
    driver.live(2, 3);
    driver.close(1, 1001);
    driver.live(2, 4);
    assert.deepEqual(driver.seen(), [1, "gap:reconnected", 3, 4]);
});

test("the old connection is lost while the new one is being opened", () => {
    const driver = live();
    driver.frame(1, "move", { to: [C], within_ms: 0, deadline_ms: 9000 });
    driver.timer("move");
    driver.close(1);
    assert.equal(driver.machine.state, "connecting");
    driver.open(2);
    driver.confirmLive(2, 1);
    driver.live(2, 7);
    assert.deepEqual(driver.seen(), ["gap:reconnected", 7]);
    assert.equal(driver.machine.state, "connected");
});

test("the old connection is lost before the move begins: its targets come first", () => {
    const driver = live();
    driver.frame(1, "move", { to: [C], within_ms: 500, deadline_ms: 9000 });
    driver.close(1);
    assert.deepEqual(driver.timer("move"), []);
    assert.deepEqual(only(driver.timer("reconnect"), "open"), [{ type: "open", conn: 2, url: C }]);
});

test("without bye the old connection counts as lost after 10 s", () => {
    const driver = live();
    overlap(driver);
    driver.frame(2, "moved_in");
    assert.deepEqual(driver.delay("bye"), [10, 10]);
    const actions = driver.timer("bye");
    assert.deepEqual(only(actions, "close").map(({ conn }) => conn), [1]);
    assert.deepEqual(driver.seen(), ["gap:reconnected"]);
    assert.equal(driver.machine.state, "connected");
});

test("the old broker closes the session for the new connection: that is no newer page", () => {
    const driver = live();
    overlap(driver);
    driver.close(1, 4004);
    assert.equal(driver.machine.state, "connected");
});

test("the old broker refuses for good: both connections end", () => {
    const driver = live();
    overlap(driver);
    const actions = driver.close(1, 4001);
    assert.deepEqual(only(actions, "close").map(({ conn }) => conn), [2]);
    assert.equal(driver.machine.state, "stopped");
});

test("the new connection is lost between leave and bye: the old one goes on", () => {
    const driver = logged();
    overlap(driver);
    driver.frame(2, "moved_in");
    driver.close(2);
    driver.data(1, 11);
    assert.deepEqual(driver.frame(1, "bye", { p: { S1: 11 } }), []);
    driver.data(1, 12);
    assert.deepEqual(driver.seen(), [11, 12]);
    driver.close(1, 1001);
    assert.equal(driver.machine.state, "waiting");
});

test("subscriptions during the overlap are made at both brokers, after leave at the new one", () => {
    const driver = logged();
    overlap(driver);
    const conns = (actions, type) => {
        return only(actions, "send").filter(({ frame }) => frame.type === type).map(({ conn }) => conn);
    };
    assert.deepEqual(conns(driver.subscribe(2, "sport"), "subscribe"), [1, 2]);
    driver.confirmLogged(2, 2, 5, { s: "S2" });
    driver.confirmLogged(1, 2, 4, { s: "S2" });
    driver.data(1, 5, "S2");
    driver.data(1, 6, "S2");
    driver.data(2, 6, "S2");
    assert.deepEqual(driver.seen(2), [6]);
    assert.deepEqual(conns(driver.do("unsubscribe", { sub: 2 }), "unsubscribe"), [1, 2]);
    driver.frame(2, "moved_in");
    assert.deepEqual(conns(driver.subscribe(3, "sport"), "subscribe"), [2]);
});

test("publications go to the old broker until leave, then to the new one", () => {
    const driver = live();
    overlap(driver);
    const publish = (id) => only(driver.do("publish", { id, channel: "news", d: "" }), "send")[0].conn;
    assert.equal(publish(1), 1);
    driver.frame(2, "moved_in");
    assert.equal(publish(2), 2);
    driver.frame(1, "published", { ref: 2 });
    assert.deepEqual(only(driver.frame(1, "bye", { p: {} }), "publish_failed"), []);
});

test("a second move while the client moves is ignored; before that it replaces the first", () => {
    const driver = live();
    driver.frame(1, "move", { to: [C], within_ms: 500, deadline_ms: 9000 });
    driver.frame(1, "move", { to: [B], within_ms: 500, deadline_ms: 9000 });
    assert.equal(only(driver.timer("move"), "open")[0].url, B);
    assert.deepEqual(driver.frame(1, "move", { to: [A], within_ms: 0, deadline_ms: 9000 }), []);
});

test("moved_in and bye without a move are ignored", () => {
    const driver = live();
    assert.deepEqual([...driver.frame(1, "moved_in"), ...driver.frame(1, "bye", { p: {} })], []);
});

test("a queue that is full during the overlap pauses both connections", () => {
    const driver = logged({ queue_max: 2 });
    overlap(driver);
    driver.finishes = false;
    driver.data(1, 11);
    driver.data(2, 12);
    const actions = driver.data(1, 13);
    assert.deepEqual(only(actions, "send").map(({ conn, frame }) => [conn, frame.type]), [
        [1, "unsubscribe"], [2, "unsubscribe"],
    ]);
    driver.frame(2, "moved_in");
    driver.frame(1, "bye", { p: {} });
    const [asked] = only(driver.do("handled", { sub: 1 }), "send").filter(({ frame }) => frame.type === "subscribe");
    assert.deepEqual([asked.conn, asked.frame.since.offset], [2, 12]);
});

test("the bye of a move that failed is not taken for that of the next one", () => {
    const driver = live();
    overlap(driver);
    driver.frame(2, "moved_in");
    driver.close(2);
    driver.frame(1, "move", { to: [B], within_ms: 0, deadline_ms: 9000 });
    driver.timer("move");
    driver.open(3);
    driver.confirmLive(3, 1);
    driver.frame(3, "moved_in");
    assert.deepEqual(driver.frame(1, "bye", { p: {} }), []);
    assert.equal(only(driver.frame(1, "bye", { p: {} }), "moved").length, 1);
});

test("a subscription that was made between leave and bye is made at the old broker when the new one is lost", () => {
    const driver = live();
    overlap(driver);
    driver.frame(2, "moved_in");
    driver.subscribe(2, "sport");
    const [asked] = only(driver.close(2), "send");
    assert.deepEqual([asked.conn, asked.frame.type, asked.frame.channel], [1, "subscribe", "sport"]);
});

test("a subscription during the overlap that the new broker refuses does not end the migration", () => {
    const driver = live();
    overlap(driver);
    driver.subscribe(2, "secret");
    const actions = driver.frame(2, "error", { code: "forbidden", message: "no", retry: "never", ref: 2 });
    assert.equal(only(actions, "subscription_failed")[0].ended, true);
    assert.equal(only(driver.frame(2, "moved_in"), "send")[0].frame.type, "leave");
});

test("after a migration, also a failed one, the connection that is left says which epoch is present", () => {
    const asked = (actions) => frames(actions, "subscribe").map(({ since }) => since.epoch);
    const begin = () => {
        const driver = logged();
        overlap(driver);
        driver.gap(2, { epoch: LATER_EPOCH, offset: 0 });
        driver.gap(1, { epoch: "between", offset: 0 });
        driver.gap(1, { epoch: LATER_EPOCH, offset: 0 });
        assert.equal(driver.machine.position(1).epoch, "between");
        return driver;
    };
    const moved = begin();
    moved.frame(2, "moved_in");
    assert.deepEqual(asked(moved.frame(1, "bye", { p: {} })), ["between"]);
    const failed = begin();
    assert.deepEqual(asked(failed.timer("move_deadline")), ["between"]);
});

test("the alternates of the new broker replace those of the old one", () => {
    const driver = live();
    overlap(driver, { alternates: ["ws://d/connect"] });
    driver.frame(2, "moved_in");
    driver.frame(1, "bye", { p: {} });
    driver.close(2);
    assert.equal(only(driver.timer("reconnect"), "open")[0].url, "ws://d/connect");
});

test("a gap that was reported is not reported again by a migration", () => {
    const driver = live();
    driver.close(1);
    driver.timer("reconnect");
    driver.open(2);
    driver.confirmLive(2, 1);
    driver.frame(2, "move", { to: [C], within_ms: 0, deadline_ms: 9000 });
    driver.timer("move");
    driver.open(3);
    driver.confirmLive(3, 1);
    driver.frame(3, "moved_in");
    driver.frame(2, "bye", { p: {} });
    assert.deepEqual(driver.seen(), ["gap:reconnected"]);
});

test("leave waits for subscriptions that were made after connect", () => {
    const driver = live();
    overlap(driver);
    driver.subscribe(2, "sport");
    driver.confirmLive(1, 2, "S2");
    assert.deepEqual(driver.frame(2, "moved_in"), []);
    driver.live(1, 1, undefined, "S2");
    const actions = driver.confirmLive(2, 2, "S2");
    assert.deepEqual(only(actions, "send").map(({ conn, frame }) => [conn, frame.type]), [[1, "leave"]]);
});

test("leave does not wait for a subscription that ended, but for one that the new broker cannot make now", () => {
    const driver = live();
    overlap(driver);
    driver.subscribe(2, "sport");
    driver.frame(2, "moved_in");
    assert.equal(frames(driver.do("unsubscribe", { sub: 2 }), "leave").length, 1);

    const later = live();
    overlap(later);
    later.subscribe(2, "sport");
    later.confirmLive(1, 2, "S2");
    later.frame(2, "moved_in");
    const error = { code: "log_unavailable", message: "", retry: "later", ref: 2 };
    assert.equal(frames(later.frame(2, "error", error), "leave").length, 0);
    later.timer("retry:2");
    assert.equal(frames(later.confirmLive(2, 3, "S2"), "leave").length, 1);
});
