import assert from "node:assert/strict";
import test from "node:test";

import { Driver, EPOCH, LATER_EPOCH, frames, live, logged, only } from "./driver.js";

const at = (offset) => ({ epoch: EPOCH, offset });

test("publications are handed over in order", () => {
    const driver = logged();
    for (const offset of [11, 12, 13]) driver.data(1, offset);
    assert.deepEqual(driver.seen(), [11, 12, 13]);
    assert.deepEqual(driver.itemsOf(1)[0], { type: "publication", d: "text 11", epoch: EPOCH, offset: 11 });
});

test("a copy is dropped", () => {
    const driver = logged();
    for (const offset of [11, 11, 10, 12]) driver.data(1, offset);
    assert.deepEqual(driver.seen(), [11, 12]);
});

test("a hole is read again from what was received, once", () => {
    const driver = logged();
    driver.data(1, 11);
    const asked = frames(driver.data(1, 13), "subscribe");
    assert.deepEqual(asked, [{ type: "subscribe", ref: 2, channel: "news", since: { epoch: EPOCH, offset: 11 } }]);
    assert.deepEqual(driver.data(1, 14), []);
    driver.confirmLogged(1, 2, 11);
    for (const offset of [12, 13, 14]) driver.data(1, offset);
    assert.deepEqual(driver.seen(), [11, 12, 13, 14]);
});

test("a hole that reading again does not close is tried again after a while", () => {
    const driver = logged();
    driver.data(1, 12);
    driver.confirmLogged(1, 2, 10);
    assert.deepEqual(frames(driver.data(1, 12), "subscribe"), []);
    assert.deepEqual(driver.delay("retry:1"), [0.5, 1]);
    assert.equal(frames(driver.timer("retry:1"), "subscribe").length, 1);
});

test("the next publication waits for the handler, and so do position, store and ack", () => {
    const driver = logged({ stored: true });
    driver.finishes = false;
    driver.timer("save");
    driver.data(1, 11);
    const actions = driver.data(1, 12);
    assert.deepEqual(driver.seen(), [11]);
    assert.deepEqual(frames(actions, "ack"), []);
    assert.deepEqual(driver.machine.position(1), { epoch: EPOCH, offset: 10 });

    const handled = driver.do("handled", { sub: 1 });
    assert.deepEqual(frames(handled, "ack"), [{ type: "ack", p: { S1: at(11) } }]);
    assert.deepEqual(driver.machine.position(1), { epoch: EPOCH, offset: 11 });
    assert.deepEqual(driver.seen(), [11, 12]);
    const [{ state }] = only(driver.timer("save"), "save");
    assert.deepEqual(state.positions, { "channel\nnews\n{}": { epoch: EPOCH, offset: 11 } });
});

test("acks are at least ack_s apart, and carry the newest position", () => {
    const driver = logged({ stored: true });
    assert.equal(frames(driver.data(1, 11), "ack").length, 1);
    assert.deepEqual(driver.delay("ack"), [1, 1]);
    assert.equal(frames([...driver.data(1, 12), ...driver.data(1, 13)], "ack").length, 0);
    assert.deepEqual(frames(driver.timer("ack"), "ack"), [{ type: "ack", p: { S1: at(13) } }]);
    assert.deepEqual(frames(driver.timer("ack"), "ack"), []);
    assert.deepEqual(frames(driver.data(1, 14), "ack"), [{ type: "ack", p: { S1: at(14) } }]);
});

test("a position that is due is acknowledged before the end", () => {
    const driver = logged({ stored: true });
    driver.data(1, 11);
    driver.data(1, 12);
    const actions = driver.do("close");
    assert.deepEqual(frames(actions, "ack"), [{ type: "ack", p: { S1: at(12) } }]);
    assert.deepEqual(only(actions, "close"), [{ type: "close", conn: 1, code: 1000, reason: "" }]);
    assert.equal(driver.machine.state, "closed");
});

test("a gap is an item in its place, and moves received and position", () => {
    const driver = logged();
    driver.data(1, 11);
    driver.gap(1, { from: 12, to: 20, epoch: EPOCH, offset: 20 });
    driver.data(1, 21);
    assert.deepEqual(driver.seen(), [11, "gap:trimmed", 21]);
    const item = { type: "gap", reason: "trimmed", from: 12, to: 20, epoch: EPOCH, offset: 20 };
    assert.deepEqual(driver.itemsOf(1)[1], item);
    assert.deepEqual(driver.machine.position(1), { epoch: EPOCH, offset: 21 });
});

test("a gap names all that is missing, also what it does not name itself", () => {
    const driver = logged();
    driver.gap(1, { from: 13, to: 20, epoch: EPOCH, offset: 20 });
    assert.equal(driver.itemsOf(1)[0].from, 11);
});

test("a gap to another epoch begins at its offset", () => {
    const driver = logged();
    driver.gap(1, { from: 0, to: 0, epoch: LATER_EPOCH, offset: 0 });
    for (const offset of [1, 2]) driver.data(1, offset);
    assert.deepEqual(driver.seen(), ["gap:trimmed", 1, 2]);
    assert.deepEqual(driver.machine.position(1), { epoch: LATER_EPOCH, offset: 2 });
});

test("a log that went back within its epoch is followed", () => {
    const driver = new Driver({ positions: { "channel\nnews\n{}": { epoch: EPOCH, offset: 50 } } });
    driver.do("start");
    driver.subscribe(1, "news");
    driver.open(1);
    driver.confirmLogged(1, 1, 10, { recovered: false });
    driver.gap(1, { epoch: EPOCH, offset: 10 });
    driver.data(1, 11);
    assert.deepEqual(driver.seen(), ["gap:trimmed", 11]);
    driver.gap(1, { epoch: EPOCH, offset: 9 });
    assert.deepEqual(driver.seen(), ["gap:trimmed", 11]);
});

test("without a stored position delivery begins now, at the position of subscribed", () => {
    const driver = logged();
    assert.deepEqual(driver.machine.position(1), { epoch: EPOCH, offset: 10 });
});

test("since has precedence over the stored position", () => {
    const positions = { "channel\nnews\n{}": { epoch: EPOCH, offset: 5 } };
    const since = (given) => {
        const driver = new Driver({ positions });
        driver.do("start");
        driver.subscribe(1, "news", given);
        return driver.open(1).subs[0].since;
    };
    assert.deepEqual(since(undefined), { epoch: EPOCH, offset: 5 });
    assert.deepEqual(since({ epoch: EPOCH, offset: 3 }), { epoch: EPOCH, offset: 3 });
    assert.equal(since("new"), "new");
});

test("a full queue of a logged interest pauses it, and nothing is lost", () => {
    const driver = logged({ queue_max: 4 });
    driver.finishes = false;
    for (const offset of [11, 12, 13, 14]) driver.data(1, offset);
    assert.deepEqual(frames(driver.data(1, 15), "unsubscribe"), [{ type: "unsubscribe", s: "S1" }]);
    assert.deepEqual(driver.data(1, 16), []);
    assert.deepEqual(frames(driver.do("handled", { sub: 1 }), "subscribe"), []);
    const [asked] = frames(driver.do("handled", { sub: 1 }), "subscribe");
    assert.deepEqual(asked.since, { epoch: EPOCH, offset: 14 });
    driver.finishes = true;
    driver.confirmLogged(1, asked.ref, 14);
    driver.do("handled", { sub: 1 });
    for (const offset of [15, 16]) driver.data(1, offset);
    assert.deepEqual(driver.seen(), [11, 12, 13, 14, 15, 16]);
});

test("a full queue of a live interest drops the newest, and counts them in a gap", () => {
    const driver = live({ queue_max: 2 });
    driver.finishes = false;
    for (const number of [1, 2, 3, 4, 5]) driver.live(1, number);
    driver.finishes = true;
    driver.do("handled", { sub: 1 });
    driver.live(1, 6);
    assert.deepEqual(driver.seen(), [1, 2, "gap:queue_full", 6]);
    assert.equal(driver.itemsOf(1)[2].count, 3);
});

test("gaps of live interests are handed over with their count", () => {
    const driver = live();
    driver.live(1, 1);
    driver.frame(1, "gap", { s: "S1", reason: "overload", count: 7 });
    driver.live(1, 9);
    assert.deepEqual(driver.itemsOf(1)[1], { type: "gap", reason: "overload", count: 7 });
    assert.deepEqual(driver.seen(), [1, "gap:overload", 9]);
    assert.equal(driver.machine.position(1), null);
});

test("messages of plain clients have no number, and binary ones no text", () => {
    const driver = live();
    driver.frame(1, "data", { s: "S1", d: "x" });
    driver.frame(1, "data", { s: "S1", d: "x" });
    driver.frame(1, "data", { s: "S1", b: "/w==", p: null });
    const [x, y, z] = driver.itemsOf(1);
    assert.deepEqual([x, y, z], [
        { type: "publication", d: "x" }, { type: "publication", d: "x" }, { type: "publication", b: "/w==" },
    ]);
});

test("unsubscribing ends delivery at once, and forgets the position", () => {
    const driver = logged();
    driver.finishes = false;
    driver.data(1, 11);
    driver.data(1, 12);
    assert.deepEqual(frames(driver.do("unsubscribe", { sub: 1 }), "unsubscribe"), [{ type: "unsubscribe", s: "S1" }]);
    driver.do("handled", { sub: 1 });
    driver.data(1, 13);
    driver.frame(1, "unsubscribed", { s: "S1" });
    assert.deepEqual(driver.seen(), [11]);
    assert.deepEqual(only(driver.timer("save"), "save")[0].state.positions, {});
});

test("unsubscribing before the broker has answered", () => {
    const driver = new Driver();
    driver.do("start");
    driver.open(1);
    driver.subscribe(1, "news");
    assert.deepEqual(frames(driver.do("unsubscribe", { sub: 1 }), "unsubscribe"), []);
    assert.deepEqual(frames(driver.confirmLogged(1, 1, 10), "unsubscribe"), [{ type: "unsubscribe", s: "S1" }]);
});

test("unsubscribing and subscribing again before the broker has answered keeps the newer one", () => {
    const driver = new Driver();
    driver.do("start");
    driver.open(1);
    driver.subscribe(1, "news");
    driver.do("unsubscribe", { sub: 1 });
    driver.subscribe(2, "news");
    assert.deepEqual(frames(driver.confirmLogged(1, 1, 10), "unsubscribe"), []);
    driver.confirmLogged(1, 2, 10);
    driver.data(1, 11);
    assert.deepEqual(driver.seen(2), [11]);
});

test("an interest that has no log at another broker keeps its position, and the gap comes from the broker", () => {
    const driver = logged();
    driver.data(1, 11);
    driver.close(1);
    driver.timer("reconnect");
    driver.open(2);
    driver.confirmLive(2, 1);
    driver.gap(2, { reason: "not_logged" });
    driver.live(2, 1);
    assert.deepEqual(driver.seen(), [11, "gap:not_logged", 1]);
    assert.equal(driver.machine.position(1).offset, 11);
});

test("a subscription that is refused ends; one that may be tried later is", () => {
    const driver = new Driver();
    driver.do("start");
    driver.subscribe(1, "secret");
    driver.subscribe(2, "news");
    driver.open(1);
    const refused = driver.frame(1, "error", { code: "forbidden", message: "no", retry: "never", ref: 1 });
    const error = { code: "forbidden", message: "no", retry: "never" };
    const [failed] = only(refused, "subscription_failed");
    assert.deepEqual(failed, { type: "subscription_failed", sub: 1, error, ended: true });
    const later = { code: "log_unavailable", message: "", retry: "later", retry_after_ms: 2000, ref: 2 };
    assert.equal(only(driver.frame(1, "error", later), "subscription_failed")[0].ended, false);
    assert.deepEqual(driver.delay("retry:2"), [2, 2.5]);
    assert.equal(frames(driver.timer("retry:2"), "subscribe")[0].channel, "news");
    driver.frame(1, "error", { ...later, ref: 3 });
    assert.deepEqual(driver.delay("retry:2"), [2, 3]);
    driver.timer("retry:2");
    driver.confirmLogged(1, 4, 10);
    driver.data(1, 12);
    driver.frame(1, "error", { ...later, ref: 5 });
    assert.deepEqual(driver.delay("retry:2"), [2, 2.5]);
    assert.deepEqual(only(driver.do("unsubscribe", { sub: 2 }), "clear_timer")[0].timer, "retry:2");
});

test("queries are subscribed to with their parameters", () => {
    const driver = new Driver();
    driver.do("start");
    driver.do("subscribe", { sub: 1, query: "near", params: { x: 1 } });
    assert.deepEqual(driver.open(1).subs, [{ ref: 1, query: "near", params: { x: 1 }, since: "new" }]);
});

test("a publication of the log that is handled when another broker has no log moves the position", () => {
    const driver = logged();
    driver.finishes = false;
    driver.data(1, 11);
    driver.close(1);
    driver.timer("reconnect");
    driver.open(2);
    driver.confirmLive(2, 1);
    driver.do("handled", { sub: 1 });
    assert.equal(driver.machine.position(1).offset, 11);
});

test("frames of an epoch that no gap has announced are read again", () => {
    const driver = logged({ positions: { "channel\nnews\n{}": { epoch: LATER_EPOCH, offset: 50 } } });
    const [asked] = frames(driver.data(1, 11), "subscribe");
    assert.deepEqual(asked.since, { epoch: LATER_EPOCH, offset: 50 });
    assert.deepEqual(driver.seen(), []);
});

test("only positions of the present epoch are acknowledged", () => {
    const driver = logged({ stored: true });
    driver.finishes = false;
    driver.data(1, 11);
    driver.gap(1, { epoch: LATER_EPOCH, offset: 60 });
    driver.data(1, 61);
    driver.subscribe(2, "sport", undefined, { stored: true });
    driver.confirmLogged(1, 2, 5, { s: "S2" });
    driver.data(1, 6, "S2");
    driver.do("handled", { sub: 1 });
    assert.deepEqual(frames(driver.do("handled", { sub: 2 }), "ack"), [{ type: "ack", p: { S2: at(6) } }]);
    driver.do("handled", { sub: 1 });
    const p = { S1: { epoch: LATER_EPOCH, offset: 60 } };
    assert.deepEqual(frames(driver.timer("ack"), "ack"), [{ type: "ack", p }]);
});

test("only stored subscriptions are acknowledged", () => {
    const driver = logged();
    driver.subscribe(2, "sport", undefined, { stored: true });
    driver.confirmLogged(1, 2, 5, { s: "S2" });
    assert.deepEqual(frames(driver.data(1, 11), "ack"), []);
    assert.deepEqual(frames(driver.data(1, 6, "S2"), "ack"), [{ type: "ack", p: { S2: at(6) } }]);
});

test("a stored subscription begins where brokers say, and goes on from what was received", () => {
    const driver = new Driver({ positions: { "channel\nnews\n{}": { epoch: EPOCH, offset: 5 } } });
    driver.do("start");
    driver.subscribe(1, "news", undefined, { stored: true });
    const [asked] = driver.open(1).subs;
    assert.deepEqual([asked.since, asked.stored], ["stored", true]);
    driver.confirmLogged(1, 1, 8);
    driver.data(1, 9);
    driver.close(1);
    driver.timer("ack");
    driver.timer("reconnect");
    const [again] = driver.open(2).subs;
    assert.deepEqual([again.since, again.stored], [at(9), true]);
    const confirmed = driver.confirmLogged(2, 1, 9);
    assert.deepEqual(frames(confirmed, "ack"), [{ type: "ack", p: { S1: at(9) } }]);
});

test("what was handled is acknowledged before the subscription ends", () => {
    const driver = logged({ stored: true });
    driver.data(1, 11);
    driver.data(1, 12);
    const sent = only(driver.do("unsubscribe", { sub: 1 }), "send").map(({ frame }) => frame);
    assert.deepEqual(sent, [{ type: "ack", p: { S1: at(12) } }, { type: "unsubscribe", s: "S1" }]);
});

test("a stored subscription of which something is lost begins with a gap", () => {
    const driver = new Driver();
    driver.do("start");
    driver.subscribe(1, "news", undefined, { stored: true });
    driver.open(1);
    driver.confirmLogged(1, 1, 8, { recovered: false });
    driver.close(1);
    driver.timer("reconnect");
    assert.equal(driver.open(2).subs[0].since, "stored");
    driver.confirmLogged(2, 1, 8, { recovered: false });
    const acks = frames(driver.gap(2, { from: 6, to: 8, epoch: EPOCH, offset: 8 }), "ack");
    assert.deepEqual(acks, [{ type: "ack", p: { S1: at(8) } }]);
    driver.data(2, 9);
    assert.deepEqual(driver.seen(), ["gap:trimmed", 9]);
});

test("asking for new publications forgets the stored position", () => {
    const driver = new Driver({ positions: { "channel\nnews\n{}": { epoch: EPOCH, offset: 5 } } });
    driver.subscribe(1, "news", "new");
    assert.deepEqual(only(driver.do("flush"), "save")[0].state.positions, {});
});

test("stored positions are bounded: those that were handled longest ago go first", () => {
    const positions = {};
    for (let index = 0; index < 1000; index += 1) positions[`channel\n${index}\n{}`] = { epoch: EPOCH, offset: 1 };
    const driver = new Driver({ positions });
    driver.do("start");
    driver.subscribe(1, "0");
    driver.subscribe(2, "news");
    driver.open(1);
    driver.confirmLogged(1, 1, 1);
    driver.data(1, 2);
    driver.confirmLogged(1, 2, 7, { s: "S2" });
    const [{ state }] = only(driver.timer("save"), "save");
    assert.equal(Object.keys(state.positions).length, 1000);
    assert.deepEqual(state.positions["channel\n0\n{}"], { epoch: EPOCH, offset: 2 });
    assert.equal(state.positions["channel\n1\n{}"], undefined);
});

test("remembered publishers are bounded: those that have published longest ago go first", () => {
    const driver = live({ queue_max: 5000 });
    for (let index = 0; index < 1000; index += 1) driver.live(1, 1, `p${index}`);
    driver.live(1, 2, "p0");
    driver.live(1, 1, "another");
    const { numbers } = driver.machine.subscriptions.get(1);
    assert.deepEqual([numbers.size, numbers.get("p0"), numbers.has("p1")], [1000, 2, false]);
});

test("former epochs are bounded", () => {
    const driver = logged();
    for (let life = 0; life < 10; life += 1) driver.gap(1, { epoch: `epoch${life}`, offset: 0 });
    const { former_epochs } = driver.machine.subscriptions.get(1);
    assert.deepEqual(former_epochs, ["epoch5", "epoch6", "epoch7", "epoch8"]);
});
