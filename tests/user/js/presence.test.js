import assert from "node:assert/strict";
import test from "node:test";

import { Presence, interestKey } from "../../../user/js/dynamoth.js";
import { C, Driver, EPOCH, LATER_EPOCH, frames, only } from "./driver.js";

const S = "S1";

/** A driver that watches "room" from offset 10, and has asked for the members. */
function watching() {
    const driver = new Driver();
    driver.do("start");
    driver.do("subscribe", { sub: 1, presence: "room" });
    const connect = driver.open(1);
    assert.deepEqual(connect.subs, [{ ref: 1, presence: "room", since: "new" }]);
    const asked = frames(driver.confirmLogged(1, 1, 10), "members");
    assert.deepEqual(asked, [{ type: "members", ref: 2, channel: "room" }]);
    return driver;
}

function list(driver, conn, ref, offset, members, epoch = EPOCH) {
    return driver.frame(conn, "members", { ref, members, count: members.length, epoch, offset });
}

function change(driver, conn, offset, kind, user) {
    const d = JSON.stringify({ [kind]: { user, member: `m-${user}` } });
    return driver.frame(conn, "data", { s: S, o: offset, d });
}

function changes(actions) {
    return only(actions, "member").map(({ change: kind, user }) => `${kind} ${user}`);
}

test("the list, and what comes behind it", () => {
    const driver = watching();
    const [listed] = only(list(driver, 1, 2, 10, [["ann", "m-ann"]]), "members");
    assert.deepEqual(listed, { type: "members", sub: 1, members: [["ann", "m-ann"]], count: 1 });
    assert.deepEqual(changes(change(driver, 1, 11, "join", "bob")), ["join bob"]);
    assert.deepEqual(changes(change(driver, 1, 12, "leave", "ann")), ["leave ann"]);
    assert.deepEqual(changes(change(driver, 1, 12, "leave", "ann")), []);
});

test("what comes before the list waits for it, and what the list has does not count again", () => {
    const driver = watching();
    change(driver, 1, 11, "join", "ann");
    change(driver, 1, 12, "join", "bob");
    assert.deepEqual(changes(list(driver, 1, 2, 11, [["ann", "m-ann"]])), ["join bob"]);
    list(driver, 1, 2, 12, []);
    assert.equal(only(driver.actions, "members").length, 1);
    const later = watching();
    list(later, 1, 2, 12, [["ann", "m-ann"]]);
    assert.deepEqual(changes(change(later, 1, 11, "join", "ann")), []);
    assert.deepEqual(changes(change(later, 1, 12, "leave", "bob")), []);
    assert.deepEqual(changes(change(later, 1, 13, "join", "eve")), ["join eve"]);
});

test("after a gap the members are asked for again", () => {
    const driver = watching();
    list(driver, 1, 2, 10, []);
    const actions = driver.gap(1, { from: 11, epoch: LATER_EPOCH, offset: 3, reason: "log_lost" });
    assert.deepEqual(only(actions, "members_gap").map(({ gap }) => gap.reason), ["log_lost"]);
    assert.deepEqual(frames(actions, "members"), [{ type: "members", ref: 3, channel: "room" }]);
    assert.deepEqual(changes(change(driver, 1, 4, "join", "ann")), []);
    assert.deepEqual(changes(list(driver, 1, 3, 3, [], LATER_EPOCH)), ["join ann"]);
});

test("two parts of the members make no difference: the list is new", () => {
    const presence = new Presence(null, "room");
    const begin = (count, ...names) => {
        const members = names.map((name) => [name, `m-${name}`]);
        return presence.apply({ type: "members", members, count }).map(({ type, user }) => user ? `${type} ${user}` : type);
    };
    assert.deepEqual(begin(3, "ann", "bob"), ["list"]);
    assert.deepEqual(begin(3, "bob", "eve"), ["list"]);
    assert.deepEqual([presence.count, [...presence.members.values()]], [3, ["bob", "eve"]]);
    assert.deepEqual(begin(2, "bob", "eve"), ["list"]);
    assert.deepEqual(begin(2, "ann", "bob"), ["leave eve", "join ann"]);
    assert.deepEqual(begin(3, "ann"), ["list"]);
});

test("a list of another life of the log, and one that cannot be had, are asked for again later", () => {
    const driver = watching();
    assert.deepEqual(only(list(driver, 1, 2, 1, [], LATER_EPOCH), "members"), []);
    assert.deepEqual(driver.delay("members:1"), [0.5, 0.5]);
    const [again] = frames(driver.timer("members:1"), "members");
    const error = { code: "log_unavailable", message: "", retry: "later", retry_after_ms: 2000 };
    driver.frame(1, "error", { ref: again.ref, ...error });
    assert.deepEqual(driver.delay("members:1"), [2, 2]);
    assert.equal(frames(driver.timer("members:1"), "members").length, 1);
});

test("the broker that serves the session is asked, if another one has not answered", () => {
    const driver = watching();
    driver.close(1);
    driver.timer("reconnect");
    const connect = driver.open(2);
    assert.deepEqual(connect.subs[0].since, { epoch: EPOCH, offset: 10 });
    assert.equal(frames(driver.confirmLogged(2, 1, 10), "members").length, 1);
    list(driver, 2, 2, 10, [["ann", "m-ann"]]);
    assert.equal(only(driver.actions, "members").length, 1);
    driver.close(2);
    driver.timer("reconnect");
    driver.open(3);
    assert.deepEqual(frames(driver.confirmLogged(3, 1, 10), "members"), []);
    assert.deepEqual(changes(change(driver, 3, 11, "leave", "ann")), ["leave ann"]);
});

test("nothing is stored of a presence, and something else than a change is ignored", () => {
    const driver = watching();
    list(driver, 1, 2, 10, []);
    for (const [index, d] of ["", "[]", "{}", '{"join":1}', '{"come":{"user":"a","member":"b"}}'].entries()) {
        assert.deepEqual(only(driver.frame(1, "data", { s: S, o: 11 + index, d }), "member"), []);
    }
    assert.deepEqual(changes(change(driver, 1, 16, "join", "ann")), ["join ann"]);
    assert.equal(only(driver.do("flush"), "save").at(-1).state.positions["presence\nroom\n{}"], undefined);
    assert.equal(interestKey({ presence: "room" }), "presence\nroom\n{}");
});

test("who is present says so on every connection", () => {
    const driver = new Driver();
    driver.do("start");
    driver.do("subscribe", { sub: 1, channel: "room", present: true });
    const wanted = { channel: "room", present: true };
    assert.deepEqual(driver.open(1).subs, [{ ref: 1, ...wanted, since: "new" }]);
    driver.confirmLogged(1, 1, 10);
    driver.frame(1, "move", { to: [C], within_ms: 500, deadline_ms: 9000 });
    driver.timer("move");
    assert.deepEqual(driver.open(2).subs, [{ ref: 1, ...wanted, since: { epoch: EPOCH, offset: 10 } }]);
});

test("who is present may have its position stored, too", () => {
    const driver = new Driver();
    driver.do("start");
    driver.do("subscribe", { sub: 1, channel: "room", present: true, stored: true });
    const [wanted] = driver.open(1).subs;
    assert.deepEqual(wanted, { ref: 1, channel: "room", since: "stored", stored: true, present: true });
    driver.confirmLogged(1, 1, 10);
    assert.deepEqual(frames(driver.data(1, 11), "ack"), [{ type: "ack", p: { [S]: { epoch: EPOCH, offset: 11 } } }]);
});

test("who is present stays subscribed with a full queue, and reads again what was dropped", () => {
    const driver = new Driver({ queue_max: 2 });
    driver.finishes = false;
    driver.do("start");
    driver.do("subscribe", { sub: 1, channel: "room", present: true });
    driver.open(1);
    driver.confirmLogged(1, 1, 0);
    for (const offset of [1, 2, 3, 4]) driver.data(1, offset);
    assert.deepEqual(frames(driver.actions, "unsubscribe"), []);
    const [again] = frames(driver.do("handled", { sub: 1 }), "subscribe");
    const since = { epoch: EPOCH, offset: 2 };
    assert.deepEqual(again, { type: "subscribe", ref: 2, channel: "room", since, present: true });
    driver.data(1, 5); // Of before the answer.
    driver.confirmLogged(1, 2, 2);
    driver.finishes = true;
    driver.do("handled", { sub: 1 });
    for (const offset of [3, 4, 5]) driver.data(1, offset);
    assert.deepEqual(driver.seen(), [1, 2, 3, 4, 5]);
});

test("a connection whose move has failed is not closed as the end of the session", () => {
    const driver = watching();
    driver.frame(1, "move", { to: [C], within_ms: 500, deadline_ms: 9000 });
    driver.timer("move");
    driver.open(2);
    assert.deepEqual(only(driver.timer("move_deadline"), "close").map(({ code }) => code), [4006]);
    assert.deepEqual(only(driver.do("close"), "close").map(({ code }) => code), [1000]);
});
