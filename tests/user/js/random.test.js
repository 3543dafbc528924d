import assert from "node:assert/strict";
import test from "node:test";

import { run } from "./world.js";

const SEEDS = Number(process.env.SEEDS ?? 300);

test("random worlds", () => {
    let moved = 0;
    for (let seed = 1; seed <= SEEDS; seed += 1) moved += run(seed).moved;
    assert.ok(moved > 3 * SEEDS, `${moved} migrations`);
});
