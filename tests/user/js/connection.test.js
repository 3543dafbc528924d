import assert from "node:assert/strict";
import test from "node:test";

import { A, B, C, Driver, EPOCH, frames, live, logged, only } from "./driver.js";

test("the first frame names session, generation and subscriptions", () => {
    const driver = new Driver({ generation: 6 });
    const actions = driver.do("start");
    assert.deepEqual(only(actions, "open"), [{ type: "open", conn: 7, url: A }]);
    assert.equal(only(actions, "save")[0].state.generation, 7);
    assert.ok(actions.findIndex(({ type }) => type === "save") < actions.findIndex(({ type }) => type === "open"));
    driver.subscribe(1, "news");
    assert.deepEqual(driver.open(7), {
        type: "connect", v: 1, session: "s1", generation: 7, subs: [{ ref: 1, channel: "news", since: "new" }],
    });
    assert.equal(driver.machine.state, "connected");
});

test("a subscription between opened and connected is sent after connected", () => {
    const driver = new Driver();
    driver.do("start");
    driver.do("opened", { conn: 1 });
    assert.deepEqual(frames(driver.subscribe(1, "news"), "subscribe"), []);
    const connected = { session: "s1", broker: "b", alternates: [], ping_s: 20, ack_s: 1 };
    assert.equal(frames(driver.frame(1, "connected", connected), "subscribe").length, 1);
});

test("a lost connection is made again with what was received, not what was handled", () => {
    const driver = logged();
    driver.finishes = false;
    driver.data(1, 11);
    driver.data(1, 12);
    driver.close(1);
    assert.equal(driver.machine.state, "waiting");
    assert.deepEqual(driver.delay("reconnect"), [0, 0.5]);
    assert.deepEqual(only(driver.timer("reconnect"), "open"), [{ type: "open", conn: 2, url: B }]);
    const connect = driver.open(2);
    assert.deepEqual(connect.subs[0].since, { epoch: EPOCH, offset: 12 });
    driver.confirmLogged(2, 1, 12);
    driver.finishes = true;
    driver.data(2, 13);
    driver.do("handled", { sub: 1 });
    assert.deepEqual(driver.seen(), [11, 12, 13]);
});

test("the waits double up to 20 s, and a connection that stays up ends the row", () => {
    const driver = new Driver({ urls: [A] });
    driver.do("start");
    const delays = [];
    for (let conn = 1; conn <= 8; conn += 1) {
        driver.close(conn);
        delays.push(driver.delay("reconnect")[1]);
        driver.timer("reconnect");
    }
    assert.deepEqual(delays, [0.5, 1, 2, 4, 8, 16, 20, 20]);
    driver.open(9);
    driver.wait(5);
    driver.close(9);
    assert.equal(driver.delay("reconnect")[1], 20);
    driver.timer("reconnect");
    driver.open(10);
    driver.wait(10);
    driver.close(10);
    assert.equal(driver.delay("reconnect")[1], 0.5);
});

test("alternates come first, then the given URLs, and the lost one last", () => {
    const driver = new Driver();
    driver.do("start");
    driver.open(1, { alternates: [C, A] });
    driver.close(1);
    const urls = [];
    for (let conn = 2; conn <= 5; conn += 1) {
        urls.push(only(driver.timer("reconnect"), "open")[0].url);
        driver.close(conn);
    }
    assert.deepEqual(urls, [C, B, A, C]);
});

test("codes after which the client comes again", () => {
    for (const code of [1000, 1001, 1005, 1006, 1011, 1012, 1013, 4003]) {
        const driver = logged();
        const actions = driver.close(1, code);
        assert.equal(driver.machine.state, "waiting", String(code));
        assert.deepEqual(only(actions, "error"), []);
        assert.deepEqual(only(driver.timer("reconnect"), "open")[0].url, B);
    }
});

test("codes after which the client does not come again", () => {
    const codes = { 1008: "policy_violation", 1009: "too_large", 4001: "token_refused", 4005: "bad_frame" };
    for (const [code, name] of Object.entries(codes)) {
        const driver = logged();
        const actions = driver.close(1, Number(code));
        assert.equal(driver.machine.state, "stopped", code);
        const [{ error }] = only(actions, "error");
        assert.deepEqual([error.code, error.retry, error.close_code], [name, "never", Number(code)]);
        assert.deepEqual(only(actions, "set_timer"), []);
    }
});

test("a newer connection of the session ends this one without an error", () => {
    const driver = logged();
    const actions = driver.close(1, 4004);
    assert.deepEqual(only(actions, "error"), []);
    assert.equal(only(actions, "state")[0].code, 4004);
    assert.equal(driver.machine.state, "stopped");
});

test("what was received before the end is still handed over and stored", () => {
    const driver = logged();
    driver.finishes = false;
    driver.data(1, 11);
    driver.data(1, 12);
    driver.close(1, 4001);
    driver.finishes = true;
    driver.do("handled", { sub: 1 });
    assert.deepEqual(driver.seen(), [11, 12]);
    assert.equal(only(driver.timer("save"), "save")[0].state.positions["channel\nnews\n{}"].offset, 12);
});

test("the error before a close names it, and says how long to wait at least", () => {
    const driver = new Driver();
    driver.do("start");
    driver.do("opened", { conn: 1 });
    const full = { code: "full", message: "full", retry: "elsewhere", retry_after_ms: 3000 };
    assert.deepEqual(driver.frame(1, "error", full), []);
    driver.close(1, 1013);
    assert.deepEqual(driver.delay("reconnect"), [3, 3.5]);
    driver.timer("reconnect");
    driver.do("opened", { conn: 2 });
    driver.frame(2, "error", { code: "token_refused", message: "signature", retry: "never" });
    const [{ error }] = only(driver.close(2, 4001), "error");
    assert.deepEqual(error, { code: "token_refused", message: "signature", retry: "never", close_code: 4001 });
});

test("a ping is answered", () => {
    const driver = live();
    assert.deepEqual(driver.frame(1, "ping"), [{ type: "send", conn: 1, frame: { type: "pong" } }]);
});

test("silence for ping_s and 10 s is a lost connection; any frame postpones it", () => {
    const driver = live();
    assert.deepEqual(driver.delay("silence:1"), [30, 30]);
    driver.wait(12);
    driver.frame(1, "ping");
    driver.wait(18);
    driver.timer("silence:1");
    assert.deepEqual(driver.delay("silence:1"), [12, 12]);
    assert.equal(driver.machine.state, "connected");
    driver.wait(12);
    assert.equal(only(driver.timer("silence:1"), "close")[0].code, 4000);
    assert.equal(driver.machine.state, "waiting");
});

test("a broker that does not answer in 10 s is left", () => {
    const driver = new Driver();
    driver.do("start");
    assert.deepEqual(driver.delay("opening:1"), [10, 10]);
    driver.do("opened", { conn: 1 });
    assert.equal(only(driver.timer("opening:1"), "close").length, 1);
    assert.equal(only(driver.timer("reconnect"), "open")[0].url, B);
});

test("events of connections that were closed are ignored", () => {
    const driver = logged();
    driver.frame(1, "nonsense");
    for (const actions of [driver.data(1, 11), driver.close(1), driver.do("opened", { conn: 1 })]) {
        assert.deepEqual(actions, []);
    }
});

const BAD_FRAMES = [
    null, 7, [], {}, { type: "hello" }, { type: "constructor" }, { type: "data" }, { type: "data", s: "S1" },
    { type: "data", s: "S1", d: "a", b: "YQ==" }, { type: "data", s: "S1", d: 5, o: 11 },
    { type: "data", s: "S1", d: "x", o: -1 }, { type: "data", s: "S1", d: "x", o: 1.5 },
    { type: "data", s: "S1", d: "x" },
    { type: "data", s: "S1", b: "%", o: 11 }, { type: "data", s: "S1", d: "x", p: ["a"], o: 11 },
    { type: "gap", s: "S1", reason: "x" }, { type: "gap", s: "S1", reason: "x", epoch: EPOCH },
    { type: "subscribed", ref: 1, s: "S1" }, { type: "move", to: "x", within_ms: 1, deadline_ms: 1 },
    { type: "connected" }, { type: "error", code: 1, message: "", retry: "" }, { type: "published" },
];

test("a bad frame is reported, closes the connection, and the client comes again", () => {
    for (const frame of BAD_FRAMES) {
        const driver = logged();
        const actions = driver.do("frame", { conn: 1, frame });
        assert.deepEqual(only(actions, "error").map(({ error }) => error.code), ["bad_frame"], JSON.stringify(frame));
        assert.equal(only(actions, "close")[0].code, 4005);
        assert.equal(driver.machine.state, "waiting");
        assert.deepEqual(driver.seen(), []);
    }
});

test("unknown fields are ignored, and null is an absent field", () => {
    const driver = logged();
    driver.frame(1, "data", { s: "S1", o: 11, d: "x", b: null, p: null, trace: 1 });
    assert.deepEqual(driver.seen(), [11]);
});

test("a frame before connected is a bad one", () => {
    const driver = new Driver();
    driver.do("start");
    driver.do("opened", { conn: 1 });
    assert.equal(only(driver.frame(1, "moved_in"), "error")[0].error.code, "bad_frame");
});

test("live interests get a gap when a connection was made again, in its place", () => {
    const driver = live();
    driver.live(1, 1);
    driver.close(1);
    driver.timer("reconnect");
    driver.close(2);
    driver.timer("reconnect");
    driver.open(3);
    driver.confirmLive(3, 1);
    driver.live(3, 4);
    assert.deepEqual(driver.seen(), [1, "gap:reconnected", 4]);
    assert.deepEqual(driver.do("unsubscribe", { sub: 1 }).length, 1);
    driver.subscribe(2, "news");
    driver.confirmLive(3, 2);
    assert.deepEqual(driver.seen(2), []);
});

test("a live interest that was never confirmed gets no gap", () => {
    const driver = new Driver();
    driver.do("start");
    driver.subscribe(1, "news");
    driver.open(1);
    driver.close(1);
    driver.timer("reconnect");
    driver.open(2);
    driver.confirmLive(2, 1);
    assert.deepEqual(driver.seen(), []);
});

test("publications wait for a connection, and are answered", () => {
    const driver = new Driver();
    driver.do("start");
    assert.deepEqual(driver.do("publish", { id: 1, channel: "news", d: "x" }), []);
    driver.do("opened", { conn: 1 });
    const connected = { session: "s1", broker: "b", alternates: [], ping_s: 20, ack_s: 1 };
    const [frame] = frames(driver.frame(1, "connected", connected), "publish");
    assert.deepEqual(frame, { type: "publish", ref: 1, channel: "news", d: "x" });
    assert.deepEqual(driver.frame(1, "published", { ref: 1, epoch: EPOCH, offset: 3 }), [
        { type: "published", id: 1, epoch: EPOCH, offset: 3 },
    ]);
    driver.do("publish", { id: 2, channel: "news", b: "/w==" });
    const error = { code: "forbidden", message: "no", retry: "never" };
    assert.deepEqual(driver.frame(1, "error", { ref: 2, ...error }), [{ type: "publish_failed", id: 2, error }]);
});

test("the outcome of publications without an answer is unknown when the connection is lost", () => {
    const driver = live();
    driver.do("publish", { id: 5, channel: "news", d: "x" });
    const [failed] = only(driver.close(1), "publish_failed");
    assert.deepEqual([failed.id, failed.error.code], [5, "unknown_outcome"]);
    for (let id = 6; id <= 1005; id += 1) assert.deepEqual(driver.do("publish", { id, channel: "news", d: "" }), []);
});

test("publications are bounded, and refused after the end", () => {
    const driver = new Driver();
    driver.do("start");
    for (let id = 1; id <= 1000; id += 1) driver.do("publish", { id, channel: "news", d: "" });
    assert.equal(driver.do("publish", { id: 1001, channel: "news", d: "" })[0].error.code, "publish_queue_full");
    assert.equal(only(driver.do("close"), "publish_failed").length, 1000);
    assert.equal(driver.do("publish", { id: 1002, channel: "news", d: "" })[0].error.code, "closed");
});

test("the token is asked for before the first connection, and kept for the next", () => {
    const driver = new Driver({ has_token: true });
    const actions = driver.do("start");
    assert.deepEqual([only(actions, "get_token").length, only(actions, "open").length], [1, 0]);
    driver.do("token", { token: "t1" });
    assert.equal(driver.open(1).token, "t1");
    driver.close(1);
    assert.deepEqual(only(driver.timer("reconnect"), "get_token"), []);
    assert.equal(driver.open(2).token, "t1");
});

test("a token is refreshed before it expires", () => {
    const driver = new Driver({ has_token: true });
    driver.do("start");
    driver.do("token", { token: "t1" });
    driver.open(1, { expires_in_s: 100 });
    assert.deepEqual(driver.delay("token"), [70, 80]);
    assert.equal(only(driver.timer("token"), "get_token").length, 1);
    assert.deepEqual(frames(driver.do("token", { token: "t2" }), "refresh"), [{ type: "refresh", token: "t2" }]);
    assert.deepEqual(driver.delay("token"), [70, 80]);
    driver.close(1);
    driver.timer("reconnect");
    assert.equal(driver.open(2).token, "t2");
});

test("an expired token is replaced by a new one; without a way to get one the client stops", () => {
    const driver = new Driver({ has_token: true });
    driver.do("start");
    driver.do("token", { token: "t1" });
    driver.open(1);
    driver.frame(1, "error", { code: "token_expired", message: "expired", retry: "never" });
    assert.deepEqual(only(driver.close(1, 4002), "error"), []);
    assert.equal(only(driver.timer("reconnect"), "get_token").length, 1);
    driver.do("token", { token: "t2" });
    assert.equal(driver.open(2).token, "t2");

    const without = logged();
    assert.equal(only(without.close(1, 4002), "error")[0].error.code, "token_expired");
    assert.equal(without.machine.state, "stopped");
});

test("a token that cannot be had is asked for again", () => {
    const driver = new Driver({ has_token: true });
    driver.do("start");
    const actions = driver.do("token_failed", { message: "offline" });
    assert.equal(only(actions, "error")[0].error.code, "token_unavailable");
    assert.equal(driver.machine.state, "waiting");
    assert.equal(only(driver.timer("reconnect"), "get_token").length, 1);
});

test("a token is asked for once at a time, and not used after its end", () => {
    const driver = new Driver({ has_token: true });
    driver.do("start");
    driver.do("token", { token: "t1" });
    driver.open(1, { expires_in_s: 100 });
    driver.timer("token");
    driver.wait(101);
    driver.close(1);
    assert.deepEqual(driver.timer("reconnect").map(({ type }) => type), ["state"]);
    assert.equal(only(driver.do("token", { token: "t2" }), "open").length, 1);
    assert.equal(driver.open(2).token, "t2");
});

test("the end clears all timers", () => {
    const driver = logged({ stored: true });
    driver.data(1, 11);
    const cleared = only(driver.do("close"), "clear_timer").map(({ timer }) => timer);
    assert.deepEqual(cleared.sort(), ["ack", "save", "silence:1"]);
});

test("nothing happens after close", () => {
    const driver = logged();
    driver.finishes = false;
    driver.data(1, 11);
    driver.data(1, 12);
    driver.do("close");
    assert.deepEqual(driver.do("close"), []);
    const [save] = driver.do("handled", { sub: 1 });
    assert.equal(save.state.positions["channel\nnews\n{}"].offset, 11);
    assert.deepEqual(driver.seen(), [11]);
    for (const timer of ["reconnect", "ack", "silence:1", "save"]) assert.deepEqual(driver.timer(timer), []);
});

const tokenUntil = (exp) => `e30.${btoa(JSON.stringify({ exp, sub: "é" })).replaceAll("=", "")}.c2ln`;

test("the next refresh goes by the life of the present token, not of the longest one", () => {
    const driver = new Driver({ has_token: true });
    driver.do("start");
    driver.do("token", { token: tokenUntil(5000) });
    driver.open(1, { expires_in_s: 3600 });
    assert.deepEqual(driver.delay("token"), [2520, 2880]);
    driver.wait(3500);
    driver.timer("token");
    driver.do("token", { token: tokenUntil(5100) }); // It ends 200 s from now.
    assert.deepEqual(driver.delay("token").map(Math.round), [140, 160]);
    driver.timer("token");
    driver.do("token", { token: tokenUntil(1) });
    assert.deepEqual(driver.delay("token"), [1, 1]);
    driver.timer("token");
    driver.do("token", { token: "not readable" });
    assert.deepEqual(driver.delay("token"), [2520, 2880]);
    driver.close(1);
    driver.timer("reconnect");
    driver.open(2, { expires_in_s: 100 });
    assert.deepEqual(driver.delay("token"), [70, 80]);
    driver.timer("token");
    driver.do("token", { token: "not readable" });
    assert.deepEqual(driver.delay("token"), [70, 80]);
});

test("waiting says which broker did not serve, and why", () => {
    const driver = new Driver();
    driver.do("start");
    const [state] = only(driver.do("closed", { conn: 1, code: 1013, reason: "full" }), "state");
    assert.deepEqual([state.state, state.code, state.lost, state.reason], ["waiting", 1013, A, "full"]);
});

test("a refresh that is refused is a warning, and the next connection asks for another token", () => {
    const driver = new Driver({ has_token: true });
    driver.do("start");
    driver.do("token", { token: "t1" });
    driver.open(1, { expires_in_s: 100 });
    driver.timer("token");
    driver.do("token", { token: "t2" });
    const refused = driver.frame(1, "error", { code: "token_refused", message: "the signature is wrong", retry: "never" });
    assert.deepEqual(refused, [{ type: "warn", message: "token_refused: the signature is wrong" }]);
    assert.equal(driver.machine.state, "connected");
    driver.close(1);
    assert.equal(only(driver.timer("reconnect"), "get_token").length, 1);
    driver.do("token", { token: "t3" });
    assert.equal(driver.open(2).token, "t3");
});
