import assert from "node:assert/strict";
import test from "node:test";

import { Dynamoth } from "../../../user/js/dynamoth.js";

/** A WebSocket that a test opens, feeds and closes. */
class FakeWebSocket {
    static all = [];

    constructor(url) {
        this.url = url;
        this.readyState = 1;
        FakeWebSocket.all.push(this);
    }

    send() {}

    close() {}
}

/** Run a client until it has tried `count` times; returns what is on the console. */
async function warningsOf(t, options, serve, count = 1) {
    const warnings = [];
    t.mock.method(console, "warn", (...parts) => warnings.push(parts.join(" ")));
    t.mock.timers.enable({ apis: ["setTimeout"] });
    FakeWebSocket.all = [];
    const urls = ["wss://ann:secret@a.example/connect?secret"];
    const client = new Dynamoth(urls, { storage: null, WebSocket: FakeWebSocket, random: () => 0, ...options });
    for (let attempt = 0; attempt < count; attempt += 1) {
        while (FakeWebSocket.all.length === attempt) {
            await Promise.resolve();
            t.mock.timers.tick(1);
        }
        serve(FakeWebSocket.all[attempt]);
    }
    client.close();
    return warnings;
}

test("a broker that cannot be reached is one warning, however often the client tries", async (t) => {
    const warnings = await warningsOf(t, {}, (socket) => socket.onclose({ code: 1006, reason: "" }), 5);
    assert.equal(warnings.length, 1);
    assert.match(warnings[0], /^dynamoth: no broker serves this page.*wss:\/\/a\.example\/connect was lost or refused/);
    assert.doesNotMatch(warnings[0], /secret/);
});

test("what a broker says before it closes is a warning", async (t) => {
    const warnings = await warningsOf(t, {}, (socket) => {
        const frame = { type: "error", code: "token_refused", message: "the token has no exp", retry: "never" };
        socket.onopen();
        socket.onmessage({ data: JSON.stringify(frame) });
        socket.onclose({ code: 4001, reason: "token_refused" });
    });
    assert.deepEqual(warnings, ["dynamoth: token_refused: the token has no exp"]);
});

test("a broker that is full is a warning with its reason", async (t) => {
    const warnings = await warningsOf(t, {}, (socket) => socket.onclose({ code: 1013, reason: "full" }), 2);
    assert.equal(warnings.length, 1);
    assert.match(warnings[0], /full \(wss:\/\/a\.example\/connect, code 1013\)/);
});
