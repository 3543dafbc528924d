import assert from "node:assert/strict";
import test from "node:test";

import { canonicalParams, interestKey } from "../../../user/js/dynamoth.js";

test("canonical parameters", () => {
    const cases = [
        [{}, "{}"],
        [{ b: 1, a: "x", c: null, d: true }, '{"a":"x","b":1,"c":null,"d":true}'],
        [{ a: 1.0, b: -0, c: 1e21, d: 0.1, e: 1e-7 }, '{"a":1,"b":0,"c":1e+21,"d":0.1,"e":1e-7}'],
        [{ a: 'q"b\\n\n\u0001é\u2028' }, '{"a":"q\\"b\\\\n\\u000a\\u0001é\u2028"}'],
        // By code point: U+FF41 comes before U+1F600, though its UTF-16 unit is greater.
        [{ "😀": 1, "ａ": 2, "ab": 3, "a": 4 }, '{"a":4,"ab":3,"ａ":2,"😀":1}'],
    ];
    for (const [params, text] of cases) assert.equal(canonicalParams(params), text);
});

test("parameters without a canonical form", () => {
    for (const value of [NaN, Infinity, [], {}, undefined, 1n, "\ud800"]) {
        assert.throws(() => canonicalParams({ value }), TypeError);
    }
    assert.throws(() => canonicalParams({ "\udc00": 1 }), TypeError);
});

test("keys of interests", () => {
    assert.equal(interestKey({ channel: "news" }), "channel\nnews\n{}");
    assert.equal(interestKey({ query: "near" }), "query\nnear\n{}");
    assert.equal(interestKey({ query: "near", params: { y: 2, x: 1 } }), 'query\nnear\n{"x":1,"y":2}');
    assert.throws(() => interestKey({}), TypeError);
    assert.throws(() => interestKey({ channel: "a", query: "b" }), TypeError);
    assert.throws(() => interestKey({ channel: 7 }), TypeError);
});
