/**
 * The browser client of Dynamoth's edge brokers, in one module without dependencies.
 *
 *     import { Dynamoth } from "./dynamoth.js";
 *
 *     const client = new Dynamoth(["wss://b1.example.org/connect", "wss://b2.example.org/connect"]);
 *     const news = client.subscribe({ channel: "news" }, (publication) => show(publication.data));
 *     await client.publish("news", "hello");
 *     const room = client.presence("news", (change) => show(change.type, [...room.members.values()]));
 *     news.unsubscribe();
 *     client.close();
 *
 * `docs/brokers.md` has the protocol. The module has two layers: `SessionMachine` decides, and is pure; `Dynamoth` owns
 * the WebSockets, the timers and the handlers, and does what the machine decides.
 *
 * @module dynamoth
 */

/** The subprotocol: one JSON object per text message. */
export const SUBPROTOCOL = "dynamoth.v1.json";

/** Reconnecting waits a random time between 0 and `min(BACKOFF_S_MAX, BACKOFF_S * 2 ** attempts)`. */
const BACKOFF_S = 0.5;
const BACKOFF_S_MAX = 20;
/** A connection that was up for this long ends a row of failures: the next wait is short again. */
const STABLE_S = 10;
/** From the start of a connection to `connected`; the broker waits as long for `connect`. */
const CONNECT_S_MAX = 10;
/** Silence for `ping_s` and this means that the connection is dead. */
const SILENCE_S = 10;
/** From `leave` to `bye`; after it the old connection counts as lost. */
const BYE_S_MAX = 10;
/** Positions are saved at most this often. After a crash, what was handled since then comes again. */
const SAVE_S = 0.2;
/** A token is refreshed at a random moment between these parts of its remaining life. */
const REFRESH_RATIO_MIN = 0.7;
const REFRESH_RATIO_MAX = 0.8;
/** A token whose life is not known is refreshed no more often than this; the broker does not say it after a refresh. */
const REFRESH_S_MIN = 30;
/** The same for a token whose life is known. */
const KNOWN_REFRESH_S_MIN = 1;
/** Warnings on the console: each once, and no more than this many. */
const WARNINGS_MAX = 100;
/** Publications that wait for one handler (`queueMax`). */
const QUEUE_MAX = 1000;
/** Publications of one live interest that wait for the end of a migration. */
const HELD_MAX = 1000;
/** Publishers of one live interest whose last number is remembered. */
const PUBLISHERS_MAX = 1000;
/** Joins and leaves that wait for the list of members; with more, it is asked for again. */
const CHANGES_MAX = 10_000;
/** Calls of `publish` that wait for a connection or for an answer. */
const PUBLISHES_MAX = 1000;
/** Stored positions; the interests that were handled longest ago are forgotten first. */
const POSITIONS_MAX = 1000;
/** Earlier lives of a log that are remembered: a slow second connection may still speak of them. */
const FORMER_EPOCHS_MAX = 4;
/** Stored sessions that nobody used for this long are removed. */
const STORED_MS_MAX = 7 * 24 * 3600 * 1000;

/** Close codes after which the client does not come again, with the code of the error that it reports (null: none). */
const FINAL_CLOSE_CODES = new Map([
    [1008, "policy_violation"],
    [1009, "too_large"],
    [4001, "token_refused"],
    [4004, null],
    [4005, "bad_frame"],
]);
const TOKEN_EXPIRED = 4002;
/** The code of a connection that ended without one, or was never opened. */
const LOST = 1006;
/** What the client closes with: the end, a silent broker, a broker that broke the protocol, or did not take over. */
const CLOSE_NORMAL = 1000;
const CLOSE_SILENT = 4000;
const CLOSE_BAD_FRAME = 4005;
const CLOSE_MOVE_FAILED = 4006;
/** What a broker may send before `connected`, and instead of it. */
const FIRST_FRAMES = new Set(["connected", "error", "ping"]);
/** Errors about a token. After a refresh the connection stays, with the former token. */
const TOKEN_ERRORS = new Set(["token_refused", "token_expired"]);
/** Errors that announce a close code: that is what the client acts on and reports. */
const CLOSING_ERRORS = new Set(["bad_frame", "token_refused", "token_expired", "full", "draining"]);

// ---------------------------------------------------------------------------------------------------------------------
// Types

/**
 * The last publication of a logged interest that was handled or received.
 * @typedef {{epoch: string, offset: number}} Position
 */
/**
 * What can be subscribed to.
 * With `present`, others see that this session is on the channel.
 * @typedef {{channel: string, present?: boolean} |
 *     {query: string, params?: Record<string, string | number | boolean | null>}} Interest
 */
/**
 * What a handler gets. `data` is text, or bytes where the payload is not UTF-8. `epoch` and `offset` exist for logged
 * interests, `publisher` and `number` for live ones (but not of publications by plain Redis clients).
 * @typedef {object} Publication
 * @property {string | Uint8Array} data
 * @property {string} [epoch]
 * @property {number} [offset]
 * @property {string} [publisher]
 * @property {number} [number]
 */
/**
 * Publications are missing here. `from` and `to` are the missing offsets of a logged interest, `count` is the number
 * of missing publications of a live one, where it is known. Reasons of this client: `reconnected` (nobody listened),
 * `queue_full` (the handler is too slow), `held_full` (a migration took too long). Others come from the broker.
 * @typedef {{reason: string, from?: number, to?: number, epoch?: string, offset?: number, count?: number}} Gap
 */
/**
 * What is stored of a session. `positions` has the interest's key, see `interestKey`.
 * @typedef {{session: string, generation: number, positions: Record<string, Position>}} StoredSession
 */
/**
 * An error as the machine reports it.
 * @typedef {{code: string, message: string, retry: "never" | "later" | "elsewhere", close_code?: number}} ErrorInfo
 */
/**
 * Event of the machine. Everything is plain JSON, so that machines in other languages can be compared with this one.
 *
 * | type | fields | |
 * | --- | --- | --- |
 * | `start` | | connect |
 * | `subscribe` | `sub`; `channel`, `present`? or `presence` or `query`, `params`; `since`?, `stored`? | `sub`: used once |
 * | `unsubscribe` | `sub` | |
 * | `publish` | `id`, `channel`, `d` or `b` | answered by `published` or `publish_failed` |
 * | `opened` | `conn` | the WebSocket is open |
 * | `frame` | `conn`, `frame` | a message, parsed |
 * | `bad_frame` | `conn`, `message` | a message that is no JSON |
 * | `closed` | `conn`, `code`, `reason`? | the WebSocket has closed, or has never opened |
 * | `handled` | `sub` | the handler of the last `hand_over` has finished |
 * | `token`, `token_failed` | `token` / `message` | answers `get_token` |
 * | `timer` | `timer` | a timer that was set is due |
 * | `flush` | | the page may end: save now |
 * | `close` | | the application has finished |
 * @typedef {{type: string, [field: string]: any}} MachineEvent
 */
/**
 * Action of the machine; plain JSON, too.
 *
 * | type | fields | |
 * | --- | --- | --- |
 * | `open` | `conn`, `url` | `conn` is the generation |
 * | `send` | `conn`, `frame` | |
 * | `close` | `conn`, `code`, `reason` | nothing more comes of this connection |
 * | `set_timer` | `timer`, `delay_s_min`, `delay_s_max` | after a random time between these; replaces its namesake |
 * | `clear_timer` | `timer` | |
 * | `hand_over` | `sub`, `item` | one at a time per `sub`; `item.type` is `publication` or `gap` |
 * | `members` | `sub`, `members`: pairs of user and member, `count` | who is present now |
 * | `member` | `sub`, `change`: `join` or `leave`, `user`, `member` | since then |
 * | `members_gap` | `sub`, `gap` | such changes are missing; `members` follows |
 * | `get_token` | | |
 * | `save` | `state`: `StoredSession` | |
 * | `published` | `id`, `epoch`?, `offset`? | |
 * | `publish_failed` | `id`, `error` | |
 * | `subscription_failed` | `sub`, `error`, `ended` | with `ended` false the machine tries again |
 * | `state` | `state`, `url`, `broker`, `code`?, `lost`?, `reason`? | see `Dynamoth`; `lost`: the URL that did not serve |
 * | `moved` | `from`, `to`: names of brokers | a migration has ended well |
 * | `error` | `error` | |
 * | `warn` | `message` | for the console |
 * @typedef {{type: string, [field: string]: any}} MachineAction
 */

// ---------------------------------------------------------------------------------------------------------------------
// Names of interests

const LONE_SURROGATE = /\p{Surrogate}/u;

/**
 * Refuse text that has no UTF-8.
 * @param {unknown} text
 * @param {string} what its name in the error
 * @returns {string} the text
 */
function checkedText(text, what) {
    if (typeof text !== "string") throw new TypeError(`${what} must be a string`);
    if (LONE_SURROGATE.test(text)) throw new TypeError(`${what} has a lone surrogate, which UTF-8 cannot say`);
    return text;
}

/** @param {string} text */
function quoted(text) {
    // eslint-disable-next-line no-control-regex
    const escaped = text.replace(/["\\]/g, "\\$&").replace(/[\u0000-\u001f]/g, (character) => {
        return `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
    });
    return `"${escaped}"`;
}

/** @param {string} left @param {string} right */
function byCodePoint(left, right) {
    const a = [...left];
    const b = [...right];
    for (let index = 0; index < Math.min(a.length, b.length); index += 1) {
        const difference = a[index].codePointAt(0) - b[index].codePointAt(0);
        if (difference) return difference;
    }
    return a.length - b.length;
}

/**
 * The canonical form of the parameters of a query: the same text for the same parameters, in every language.
 * @param {Record<string, string | number | boolean | null>} params
 * @returns {string}
 * @throws {TypeError} for a value that is no string, finite number, boolean or null
 */
export function canonicalParams(params) {
    const fields = Object.keys(params).sort(byCodePoint).map((name) => {
        const value = params[name];
        checkedText(name, "the name of a parameter");
        if (typeof value === "string") return `${quoted(name)}:${quoted(checkedText(value, `parameter ${name}`))}`;
        if (typeof value === "number" && Number.isFinite(value)) return `${quoted(name)}:${String(value)}`;
        if (typeof value === "boolean" || value === null) return `${quoted(name)}:${String(value)}`;
        throw new TypeError(`parameter ${name} must be a string, a finite number, a boolean or null`);
    });
    return `{${fields.join(",")}}`;
}

/**
 * The key of an interest in `StoredSession`: the text whose hash is the interest id.
 * @param {Interest} interest
 * @returns {string}
 */
export function interestKey(interest) {
    if ("presence" in interest) return `presence\n${checkedText(interest.presence, "channel")}\n{}`;
    if (("channel" in interest) === ("query" in interest)) throw new TypeError("name either a channel or a query");
    if ("channel" in interest) return `channel\n${checkedText(interest.channel, "channel")}\n{}`;
    return `query\n${checkedText(interest.query, "query")}\n${canonicalParams(interest.params ?? {})}`;
}

// ---------------------------------------------------------------------------------------------------------------------
// Frames of the broker

const isText = (value) => typeof value === "string";
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const isTime = (value) => Number.isFinite(value) && value >= 0;
const isKey = (value) => isText(value) || isCount(value);
const isURLs = (value) => Array.isArray(value) && value.every(isText);
const isPair = (value) => Array.isArray(value) && value.length === 2 && value.every(isText);
const isMembers = (value) => Array.isArray(value) && value.every(isPair);
const isBase64 = (value) => isText(value) && value.length % 4 === 0 && /^[A-Za-z0-9+/]*={0,2}$/.test(value);
const isNumbered = (value) => Array.isArray(value) && value.length === 2 && isText(value[0]) && isCount(value[1]);
const optional = (check) => (value) => value === undefined || value === null || check(value);

/** Fields of each frame that the client reads. Others are ignored. */
const FRAME_FIELDS = {
    connected: {
        broker: isText, alternates: optional(isURLs), ping_s: isTime, ack_s: isTime, expires_in_s: optional(isTime),
    },
    subscribed: { ref: isCount, s: isKey, epoch: optional(isText), offset: optional(isCount) },
    unsubscribed: { s: isKey },
    data: { s: isKey, o: optional(isCount), d: optional(isText), b: optional(isBase64), p: optional(isNumbered) },
    gap: {
        s: isKey, reason: isText, from: optional(isCount), to: optional(isCount), epoch: optional(isText),
        offset: optional(isCount), count: optional(isCount),
    },
    published: { ref: isCount, epoch: optional(isText), offset: optional(isCount) },
    members: { ref: isCount, members: isMembers, count: isCount, epoch: isText, offset: isCount },
    move: { to: isURLs, ticket: optional(isText), within_ms: isTime, deadline_ms: isTime },
    moved_in: {},
    bye: {},
    ping: {},
    error: { code: isText, message: isText, retry: isText, retry_after_ms: optional(isTime), ref: optional(isCount) },
};

/** @param {string | null | undefined} value */
const given = (value) => value !== undefined && value !== null;

/**
 * What is wrong with a frame of the broker; null for nothing.
 * @param {any} frame
 * @returns {string | null}
 */
function frameProblem(frame) {
    if (typeof frame !== "object" || frame === null || Array.isArray(frame)) return "a frame must be an object";
    if (!Object.hasOwn(FRAME_FIELDS, frame.type)) return `unknown type of frame: ${String(frame.type)}`;
    for (const [field, check] of Object.entries(FRAME_FIELDS[frame.type])) {
        if (!check(frame[field])) return `${frame.type}: bad field ${field}`;
    }
    if (frame.type === "data" && given(frame.d) === given(frame.b)) return "data: needs d or b";
    if (frame.type === "subscribed" && frame.live !== true && !(given(frame.epoch) && given(frame.offset))) {
        return "subscribed: needs live, or epoch and offset";
    }
    if (frame.type === "gap" && given(frame.epoch) !== given(frame.offset)) return "gap: needs both epoch and offset";
    return null;
}

// ---------------------------------------------------------------------------------------------------------------------
// The machine

/**
 * Decides everything that a session does. Pure: no clock, timer, socket or random number; time comes in with `handle`.
 *
 * Theory of operation
 * -------------------
 * A *connection* is one WebSocket, named by its generation. There is one, `current`; during a migration there is also
 * `move.conn`, the new one. A *link* is one subscription on one connection. All wanted subscriptions are asked for on
 * every open connection, so either may end at any time.
 *
 * Logged interests. `received` of a subscription belongs to no connection: the first copy of an offset is taken from
 * whichever connection brings it. `data` names no epoch, so a link remembers the epoch of its connection, and frames of
 * another epoch than `received` has are dropped. A `gap` moves `received`, unless this offset was received already.
 *
 * Live interests. The last number of each publisher tells copies. While `move` lasts, a publication of the new
 * connection is handed out only if it is the next one of its publisher; others are held until `bye`. Publications
 * without a number cannot be told apart: what the new connection brings before `leave` is dropped, because the old
 * broker sends everything from before `leave`; what it brings between `leave` and `bye` is held, and can be a copy.
 *
 * `leave` waits until the new broker has confirmed all subscriptions, also those that were made after its `connect`:
 * what is published in between would be in neither stream.
 *
 * Delivery. Each subscription has a queue; its first item is with the handler. A position moves when the handler has
 * finished, whether it failed or not. When the queue is full, a logged subscription unsubscribes, and subscribes again
 * with `received` when half of the queue is free, so it loses nothing that the log still has. A live one drops the
 * newest publications, and a gap that counts them takes their place. Who is present on a channel stays subscribed, so
 * that nobody sees a leave: what comes while the queue is full is dropped, and read again later.
 *
 * Presence. The members of a channel are a list that is exact at a position, and the joins and leaves behind it, which
 * are a logged interest. The list is asked for at the main connection, at first and after each gap. Changes that come
 * before it wait.
 */
export class SessionMachine {
    /**
     * @param {object} options
     * @param {string} options.session id of the session
     * @param {string[]} options.urls brokers, in the order in which they are tried
     * @param {number} [options.generation] of the last connection that the session opened
     * @param {Record<string, Position>} [options.positions] stored positions by `interestKey`
     * @param {boolean} [options.has_token] whether `get_token` can be answered
     * @param {number} [options.queue_max] items that may wait for one handler, at least 1
     */
    constructor({ session, urls, generation = 0, positions = {}, has_token = false, queue_max = QUEUE_MAX }) {
        this.session = session;
        this.urls = [...urls];
        this.generation = generation;
        this.has_token = has_token;
        this.queue_max = queue_max;
        /** Handled positions by key; the interest that was handled last is the last one. */
        this.positions = new Map(Object.entries(positions));
        /** `idle`, `connecting`, `connected`, `waiting`, `stopped` (by a broker) or `closed` (by the application). */
        this.state = "idle";
        /** Open connections by generation: `current`, and `move.conn` while there is one. */
        this.connections = new Map();
        /** Generation of the connection that delivers; null while there is none. */
        this.current = null;
        /** The migration under way; `conn`: the new connection, `confirmed`: `moved_in` came, `left`: `leave` was sent. */
        this.move = null;
        this.subscriptions = new Map();
        /** Publications that wait for a connection: `{id, frame}`. */
        this.unsent = [];
        /** Publications that wait for an answer; with `unsent` at most PUBLISHES_MAX. */
        this.unanswered = 0;
        this.token = null;
        /** When the broker ends it, by the clock of `handle`; and its claim `exp`, by the broker's. Null: not known. */
        this.token_expires_at = null;
        this.token_exp = null;
        /** How long the last token had to live whose life a broker has named, in seconds. */
        this.token_life_s = REFRESH_S_MIN;
        /** Why a token was asked for: `connect` or `refresh`; null when none is awaited. */
        this.asking = null;
        /** URLs that the last broker named, and how often connecting has failed in a row. */
        this.alternates = [];
        this.attempts = 0;
        /** URLs of the present row of attempts, the next one first; empty when it has not begun. */
        this.candidates = [];
        this.timers = new Set();
        this.actions = [];
        this.now = 0;
    }

    /**
     * @param {MachineEvent} event
     * @param {number} now seconds since 1970, never less than before
     * @returns {MachineAction[]} what to do, in this order
     */
    handle(event, now) {
        this.now = now;
        this.actions = [];
        if (event.type === "timer") this.#onTimer(event.timer);
        else if ("conn" in event) this.#onConnectionEvent(event);
        else this.#onOwnEvent(event);
        this.#askMembers();
        return this.actions;
    }

    /**
     * The position of a subscription: what a handler has finished last; null for a live interest.
     * @param {number} sub
     * @returns {Position | null}
     */
    position(sub) {
        return this.subscriptions.get(sub)?.position ?? null;
    }

    /** Check the invariants; for tests. */
    check() {
        const ends = [this.current, this.move?.conn ?? null].filter((conn) => conn !== null);
        assert(this.connections.size === ends.length, "connections are the current one and the new one");
        for (const conn of ends) assert(this.connections.has(conn), `connection ${conn} is open`);
        assert(this.move === null || this.current !== null, "a migration has an old connection");
        assert((this.state === "connected") === (this.#main()?.phase === "connected"), "the state is the connection's");
        assert(this.unsent.length + this.unanswered <= PUBLISHES_MAX, "publications are bounded");
        for (const subscription of this.subscriptions.values()) {
            assert(subscription.queue.length <= this.queue_max + 1, "queues are bounded");
            assert(subscription.busy || subscription.queue.length === 0 || this.state === "closed", "handlers get all");
        }
        for (const { links } of this.connections.values()) {
            for (const sub of links.keys()) assert(!isAway(this.subscriptions.get(sub)), "what pauses has no links");
        }
    }

    #act(type, fields = {}) {
        this.actions.push({ type, ...fields });
    }

    #send(connection, frame) {
        this.#act("send", { conn: connection.id, frame });
    }

    #setTimer(timer, delay_s_min, delay_s_max = delay_s_min) {
        this.timers.add(timer);
        this.#act("set_timer", { timer, delay_s_min, delay_s_max });
    }

    #clearTimer(timer) {
        if (this.timers.delete(timer)) this.#act("clear_timer", { timer });
    }

    #reportError(code, message, retry, more = {}) {
        this.#act("error", { error: { code, message, retry, ...more } });
    }

    #changeState(state, more = {}) {
        this.state = state;
        const connection = this.#main();
        this.#act("state", { state, url: connection?.url ?? null, broker: connection?.broker ?? null, ...more });
    }

    #ended() {
        return this.state === "stopped" || this.state === "closed";
    }

    /** The connection for acknowledgements and publications. */
    #main() {
        return this.connections.get(this.move?.left ? this.move.conn : this.current) ?? null;
    }

    // Events

    #onOwnEvent(event) {
        switch (event.type) {
            case "start": this.#connect(); break;
            case "subscribe": this.#onSubscribe(event); break;
            case "unsubscribe": this.#onUnsubscribe(event.sub); break;
            case "publish": this.#onPublish(event); break;
            case "handled": this.#onHandled(event.sub); break;
            case "token": this.#onToken(event.token); break;
            case "token_failed": this.#onTokenFailed(event.message); break;
            case "flush": this.#save(); break;
            case "close": this.#onClose(); break;
            default: throw new TypeError(`unknown event ${event.type}`);
        }
    }

    #onConnectionEvent(event) {
        const connection = this.connections.get(event.conn);
        if (!connection) return; // It was closed from here; the event was under way.
        switch (event.type) {
            case "opened": this.#onOpened(connection); break;
            case "frame": this.#onFrame(connection, event.frame); break;
            case "bad_frame": this.#onBadFrame(connection, event.message); break;
            case "closed": this.#onLost(connection, event.code, event.reason ?? ""); break;
            default: throw new TypeError(`unknown event ${event.type}`);
        }
    }

    #onTimer(timer) {
        if (!this.timers.delete(timer)) return;
        const [kind, id] = timer.split(":");
        switch (kind) {
            case "reconnect": this.#connect(); break;
            case "opening": this.#onUnanswered(this.connections.get(Number(id))); break;
            case "silence": this.#onSilence(this.connections.get(Number(id))); break;
            case "ack": this.#acknowledge(); break;
            case "save": this.#save(); break;
            case "token": this.#ask("refresh"); break;
            case "move": this.#openMove(); break;
            case "move_deadline": this.#abandonMove(); break;
            case "bye": this.#drop(this.connections.get(this.current), CLOSE_NORMAL, "no bye"); break;
            case "members": this.#askAgain(this.subscriptions.get(Number(id))); break;
            case "retry": this.#retry(this.subscriptions.get(Number(id))); break;
            default: throw new TypeError(`unknown timer ${timer}`);
        }
    }

    #onFrame(connection, frame) {
        const problem = frameProblem(frame);
        if (problem) {
            this.#onBadFrame(connection, problem);
            return;
        }
        connection.heard_at = this.now;
        if (connection.phase !== "connected" && !FIRST_FRAMES.has(frame.type)) {
            this.#onBadFrame(connection, `${frame.type} before connected`);
            return;
        }
        switch (frame.type) {
            case "connected": this.#onConnected(connection, frame); break;
            case "subscribed": this.#onSubscribed(connection, frame); break;
            case "data": this.#onData(connection, frame); break;
            case "gap": this.#onGap(connection, frame); break;
            case "published": this.#onPublished(connection, frame); break;
            case "members": this.#onMembers(connection, frame); break;
            case "move": this.#onMove(connection, frame); break;
            case "moved_in": this.#onMovedIn(connection); break;
            case "bye": this.#onBye(connection); break;
            case "ping": this.#send(connection, { type: "pong" }); break;
            case "error": this.#onError(connection, frame); break;
            default: break; // `unsubscribed`: the link is gone already.
        }
    }

    #onBadFrame(connection, message) {
        this.#reportError("bad_frame", message, "later");
        this.#drop(connection, CLOSE_BAD_FRAME, "bad frame");
    }

    #onUnanswered(connection) {
        this.#drop(connection, CLOSE_SILENT, "the broker does not answer");
    }

    #onSilence(connection) {
        const left_s = connection.heard_at + connection.ping_s + SILENCE_S - this.now;
        if (left_s > 0.001) this.#setTimer(`silence:${connection.id}`, left_s);
        else this.#drop(connection, CLOSE_SILENT, "the broker is silent");
    }

    #onClose() {
        if (this.state === "closed") return;
        this.#acknowledge();
        this.#end("closed", {});
    }

    // Connections

    #connect() {
        if (this.#ended()) return;
        if (this.token_expires_at !== null && this.now >= this.token_expires_at) this.#forgetToken();
        if (this.has_token && this.token === null) {
            if (this.state !== "connecting") this.#changeState("connecting");
            this.#ask("connect");
            return;
        }
        if (this.candidates.length === 0) this.candidates = unique([...this.alternates, ...this.urls]);
        const url = this.candidates.shift();
        this.current = this.#open(url, null).id;
        if (this.state !== "connecting") this.#changeState("connecting");
    }

    #open(url, ticket) {
        this.generation += 1;
        const connection = {
            id: this.generation, url, ticket,
            /** `opening` (the WebSocket), `connecting` (`connect` was sent), `connected`. */
            phase: "opening", broker: null, alternates: [], ping_s: 0, ack_s: 0, heard_at: this.now, connected_at: null,
            next_ref: 1,
            /** How many times `leave` was sent and not answered by `bye`. */
            leaves: 0,
            /** What each ref without an answer asked for. */
            refs: new Map(),
            links: new Map(),
            /** Subscriptions by the broker's name of the interest. */
            by_s: new Map(),
            /** The last error that announced a close code, and how long not to come again. */
            last_error: null, retry_after_s: 0,
        };
        this.connections.set(connection.id, connection);
        this.#save(); // Another page of this session must never open a connection of the same generation.
        this.#act("open", { conn: connection.id, url });
        this.#setTimer(`opening:${connection.id}`, CONNECT_S_MAX);
        return connection;
    }

    #onOpened(connection) {
        connection.phase = "connecting";
        const frame = { type: "connect", v: 1, session: this.session, generation: connection.id };
        if (this.token !== null) frame.token = this.token;
        if (connection.ticket !== null) frame.ticket = connection.ticket;
        frame.subs = [];
        for (const subscription of this.subscriptions.values()) {
            if (!isAway(subscription)) frame.subs.push(this.#request(connection, subscription, true));
        }
        this.#send(connection, frame);
    }

    #onConnected(connection, frame) {
        if (given(frame.alternates)) connection.alternates = frame.alternates;
        connection.broker = frame.broker;
        connection.ping_s = frame.ping_s;
        connection.ack_s = frame.ack_s;
        this.#scheduleRefresh(frame.expires_in_s === undefined ? null : this.now + frame.expires_in_s);
        const is_first = connection.phase !== "connected";
        connection.phase = "connected";
        if (connection === this.#main()) this.alternates = connection.alternates;
        if (!is_first) return;
        connection.connected_at = this.now;
        this.#clearTimer(`opening:${connection.id}`);
        this.#setTimer(`silence:${connection.id}`, connection.ping_s + SILENCE_S);
        if (connection === this.#main()) this.#onMainConnected();
        for (const subscription of this.subscriptions.values()) this.#subscribeOn(connection, subscription);
    }

    #onMainConnected() {
        this.candidates = [];
        this.#changeState("connected");
        this.#sendUnsent();
    }

    /** Close a connection, and go on as when it was lost. */
    #drop(connection, code, reason) {
        this.#act("close", { conn: connection.id, code, reason });
        this.#onLost(connection, code === CLOSE_BAD_FRAME ? 1006 : code, reason);
    }

    /** Forget a connection that is closed: nobody answers its publications now. */
    #forget(connection) {
        this.connections.delete(connection.id);
        this.#clearTimer(`opening:${connection.id}`);
        this.#clearTimer(`silence:${connection.id}`);
        for (const { publish } of connection.refs.values()) {
            if (publish === undefined) continue;
            this.unanswered -= 1;
            const message = "the connection was lost before the broker answered: it may be published or not";
            this.#act("publish_failed", { id: publish, error: { code: "unknown_outcome", message, retry: "later" } });
        }
    }

    #onLost(connection, code, reason) {
        if (code === TOKEN_EXPIRED) this.#forgetToken();
        const is_new = this.move?.conn === connection.id;
        this.#forget(connection);
        if (is_new) {
            this.#onNewLost(connection);
            return;
        }
        const move = this.move;
        const is_replaced_by_own = code === 4004 && move !== null && move.conn !== null;
        this.#clearMoveTimers();
        this.move = null;
        this.current = null;
        const { code: error_code, message } = finalError(connection, code, reason, this.has_token);
        if (error_code !== undefined && !is_replaced_by_own) {
            if (error_code !== null) this.#reportError(error_code, message, "never", { close_code: code });
            this.#end("stopped", { code });
        } else if (move?.conn) {
            this.#promote(this.connections.get(move.conn), connection);
        } else {
            this.#missLive(connection);
            this.#reconnect(connection, move?.to ?? [], { code, lost: connection.url, reason: code === LOST ? reason : message });
        }
    }

    #closeQuietly(connection, code = CLOSE_NORMAL) {
        this.#act("close", { conn: connection.id, code, reason: "" });
        this.#forget(connection);
    }

    /** Wait and connect again. `preferred` brokers come first, the one that was lost comes last. */
    #reconnect(connection, preferred, why) {
        if (connection.connected_at !== null) {
            this.candidates = unique([...preferred, ...this.alternates, ...this.urls]);
            if (this.now - connection.connected_at >= STABLE_S) this.attempts = 0;
            if (this.candidates.includes(connection.url)) {
                this.candidates = [...this.candidates.filter((url) => url !== connection.url), connection.url];
            }
        }
        this.#wait(connection.retry_after_s, why);
    }

    #wait(retry_after_s, why = { code: null }) {
        this.#changeState("waiting", why);
        const delay_s_max = backoff_s_max(this.attempts);
        this.attempts += 1;
        this.#setTimer("reconnect", retry_after_s, retry_after_s + delay_s_max);
    }

    #end(state, more) {
        this.#clearMoveTimers();
        this.move = null;
        this.current = null;
        for (const connection of [...this.connections.values()]) this.#closeQuietly(connection);
        for (const timer of [...this.timers]) this.#clearTimer(timer);
        const error = { code: "closed", message: "the client is closed", retry: "never" };
        for (const { id } of this.unsent) this.#act("publish_failed", { id, error });
        this.unsent = [];
        this.#save();
        this.#changeState(state, more);
    }

    // Tokens

    #forgetToken() {
        this.token = null;
        this.token_expires_at = null;
    }

    #ask(why) {
        const is_asked = this.asking !== null;
        if (this.asking !== "connect") this.asking = why;
        if (!is_asked) this.#act("get_token");
    }

    #onToken(token) {
        const why = this.asking;
        this.asking = null;
        if (this.#ended()) return;
        const former_exp = this.token_exp;
        this.token = token;
        this.token_exp = expiry(token);
        // The broker's clock says when the former token ends: this one does so later by the difference.
        const later_s = former_exp === null || this.token_exp === null ? null : this.token_exp - former_exp;
        const is_known = later_s !== null && this.token_expires_at !== null;
        this.token_expires_at = is_known ? this.token_expires_at + later_s : null;
        for (const connection of this.connections.values()) {
            if (connection.phase === "connected") this.#send(connection, { type: "refresh", token });
        }
        if (why === "connect") this.#connect();
        else this.#refreshAfter(is_known ? this.token_expires_at - this.now : this.token_life_s);
    }

    #onTokenFailed(message) {
        const why = this.asking;
        this.asking = null;
        if (this.#ended()) return;
        this.#reportError("token_unavailable", message, "later");
        if (why === "connect") this.#wait(0);
        else this.#setTimer("token", 1, 1 + BACKOFF_S_MAX / 4);
    }

    /** A refresh was refused, or the token has just expired. The connection may stay; the next one needs another token. */
    #onTokenRefused(code, message) {
        if (this.has_token) this.#forgetToken();
        this.#act("warn", { message: `${code}: ${message}` });
    }

    #scheduleRefresh(expires_at) {
        if (!this.has_token || expires_at === null) return;
        const life_s = Math.max(0, expires_at - this.now);
        this.token_expires_at = expires_at;
        this.token_life_s = Math.max(REFRESH_S_MIN, life_s);
        this.#refreshAfter(life_s, 0);
    }

    #refreshAfter(life_s, delay_s_min = KNOWN_REFRESH_S_MIN) {
        const delay_s = (ratio) => Math.max(life_s * ratio, delay_s_min);
        this.#setTimer("token", delay_s(REFRESH_RATIO_MIN), delay_s(REFRESH_RATIO_MAX));
    }

    // Subscriptions

    #onSubscribe({ sub, channel, presence, query, params, since, stored = false, present = false }) {
        const interest = interestOf({ channel, presence, query, params });
        const key = interestKey(interest);
        if (since === "new") this.positions.delete(key);
        const kept = stored ? null : this.positions.get(key);
        const position = since === "new" ? null : copied(since ?? kept ?? null);
        const subscription = {
            id: sub, interest, key, position,
            /** Whether brokers keep its position: only then it is acknowledged. */
            stored,
            /** Whether others see that this session is on the channel. */
            present,
            /**
             * Of a presence: `listed` is where the list is exact, null while one is missing; `asked` is the connection
             * that was asked; `waiting` are changes that came since.
             */
            roster: presence === undefined ? null : { listed: null, asked: null, waiting: [] },
            /** Logged: the last frame that was taken in. At `position` or ahead of it, by what is in the queue. */
            received: copied(position),
            former_epochs: [],
            /** Live: the last number of each publisher; who published last is the last one. */
            numbers: new Map(),
            /** Whether the broker says that it is live; null: it has not said. */
            live: null,
            /** Live: nobody listened since the last publication. */
            missed: false,
            /** First the item that is with the handler (`busy`), then what waits for it. */
            queue: [], busy: false,
            /** Logged: the queue is full; nothing is subscribed until half of it is free. */
            paused: false,
            failures: 0,
        };
        this.subscriptions.set(sub, subscription);
        for (const connection of this.connections.values()) this.#subscribeOn(connection, subscription);
    }

    #onUnsubscribe(sub) {
        const subscription = this.subscriptions.get(sub);
        if (!subscription) return;
        if (subscription.stored) this.#acknowledge();
        this.#removeSubscription(subscription);
        if (this.positions.delete(subscription.key)) this.#saveSoon();
    }

    #removeSubscription(subscription) {
        this.#unlink(subscription);
        this.subscriptions.delete(subscription.id);
        this.#clearTimer(`retry:${subscription.id}`);
        this.#clearTimer(`members:${subscription.id}`);
    }

    /** Whether the old broker was left: it takes no subscriptions now. */
    #isLeft(connection) {
        return this.move?.left === true && connection.id === this.current;
    }

    #subscribeOn(connection, subscription) {
        if (connection.phase !== "connected" || isAway(subscription) || this.#isLeft(connection)) return;
        if (connection.links.has(subscription.id)) return;
        this.#send(connection, { type: "subscribe", ...this.#request(connection, subscription, false) });
    }

    /** Make or renew the link of a subscription; returns what the broker is asked for. */
    #request(connection, subscription, in_connect) {
        const ref = connection.next_ref;
        connection.next_ref += 1;
        let link = connection.links.get(subscription.id);
        if (!link) {
            link = {
                s: null, live: false, epoch: null, acked: null,
                /** Live, on the new connection: what waits for `bye`, and how many did not fit. */
                held: [], held_lost: 0,
                /** Logged: where a hole was read again last. */
                hole_at: null,
                /** Logged: the broker has less than the client asked for; its next gap moves `received` back. */
                went_back: false,
            };
            connection.links.set(subscription.id, link);
        }
        const { stored, present } = subscription;
        const since = copied(subscription.received) ?? (stored ? "stored" : "new");
        Object.assign(link, { ref, pending: true, since, failed: false });
        connection.refs.set(ref, { sub: subscription.id, key: subscription.key, in_connect });
        const options = { ...(stored ? { stored } : {}), ...(present ? { present } : {}) };
        return { ref, ...subscription.interest, since, ...options };
    }

    /** End a subscription's links, on all connections. */
    #unlink(subscription) {
        for (const connection of this.connections.values()) {
            const link = connection.links.get(subscription.id);
            if (!link) continue;
            connection.links.delete(subscription.id);
            if (link.s === null) continue; // `#onSubscribed` ends it: only then its name is known.
            connection.by_s.delete(link.s);
            connection.refs.delete(link.ref);
            if (!this.#isLeft(connection)) this.#send(connection, { type: "unsubscribe", s: link.s });
        }
        this.#leaveIfReady();
    }

    #onSubscribed(connection, frame) {
        const request = connection.refs.get(frame.ref);
        if (request?.sub === undefined) return;
        connection.refs.delete(frame.ref);
        const link = connection.links.get(request.sub);
        if (!link) {
            this.#endUnwanted(connection, request.key, frame.s);
            return;
        }
        if (link.ref !== frame.ref) return; // It was asked for again since.
        const subscription = this.subscriptions.get(request.sub);
        Object.assign(link, { s: frame.s, pending: false, live: frame.live === true, epoch: frame.epoch ?? null });
        connection.by_s.set(frame.s, subscription.id);
        subscription.failures = 0;
        if (link.live) this.#onSubscribedLive(subscription);
        else this.#onSubscribedLogged(link, subscription, frame);
        this.#leaveIfReady();
        if (!this.timers.has("ack")) this.#acknowledge(); // The former broker may not have stored the position.
    }

    /** The application unsubscribed before the name of the interest was known. */
    #endUnwanted(connection, key, s) {
        for (const sub of connection.links.keys()) {
            if (this.subscriptions.get(sub).key === key) return; // It has subscribed again.
        }
        this.#send(connection, { type: "unsubscribe", s });
    }

    #onSubscribedLive(subscription) {
        // Who has a position gets a gap of the broker, and keeps it: another broker may have the log.
        if (subscription.missed && subscription.received === null) {
            this.#enqueueLive(subscription, { type: "gap", reason: "reconnected" });
        }
        subscription.live = true;
        subscription.missed = false;
    }

    #onSubscribedLogged(link, subscription, frame) {
        subscription.live = false;
        link.went_back = frame.epoch === link.since.epoch && frame.offset < link.since.offset;
        if (frame.recovered === false && link.since === "stored") return; // The gap that follows says where it begins.
        if (subscription.received === null) {
            subscription.received = { epoch: frame.epoch, offset: frame.offset };
            link.acked = copied(subscription.received);
            if (subscription.missed) {
                this.#enqueueLive(subscription, { type: "gap", reason: "reconnected", ...subscription.received });
            } else if (subscription.queue.length === 0 && subscription.roster === null) {
                this.#movePosition(subscription, subscription.received);
            }
            subscription.missed = false;
        }
    }

    #retryLater(subscription, retry_after_s) {
        const delay_s_max = backoff_s_max(subscription.failures);
        subscription.failures += 1;
        this.#setTimer(`retry:${subscription.id}`, retry_after_s, retry_after_s + delay_s_max);
    }

    #retry(subscription) {
        for (const connection of this.connections.values()) {
            const link = connection.links.get(subscription.id);
            if (link?.failed) this.#subscribeAgain(connection, subscription);
            else this.#subscribeOn(connection, subscription);
        }
    }

    #subscribeAgain(connection, subscription) {
        if (this.#isLeft(connection)) return;
        this.#send(connection, { type: "subscribe", ...this.#request(connection, subscription, false) });
    }

    // Delivery

    #onData(connection, frame) {
        const subscription = this.subscriptions.get(connection.by_s.get(frame.s));
        if (!subscription) return; // It was unsubscribed; the frame was under way.
        const link = connection.links.get(subscription.id);
        const item = { type: "publication" };
        if (given(frame.d)) item.d = frame.d;
        else item.b = frame.b;
        if (link.live) this.#onLiveData(connection, link, subscription, item, frame.p ?? null);
        else if (given(frame.o)) this.#onLoggedData(connection, link, subscription, item, frame.o);
        else this.#onBadFrame(connection, "data: no offset of a logged interest");
    }

    #onLoggedData(connection, link, subscription, item, offset) {
        if (subscription.paused) return; // It is read again later.
        const received = subscription.received;
        if (received === null) {
            this.#onBadFrame(connection, "data before the gap at its beginning");
        } else if (link.epoch !== received.epoch) {
            if (!this.#isFormer(subscription, link.epoch)) this.#onHole(connection, link, subscription);
        } else if (offset > received.offset + 1) {
            this.#onHole(connection, link, subscription);
        } else if (offset === received.offset + 1 && !this.#pauseIfFull(subscription)) {
            subscription.received = { epoch: received.epoch, offset };
            if (subscription.roster !== null) this.#onMemberChange(subscription, item);
            else this.#enqueue(subscription, { ...item, ...subscription.received });
        }
    }

    /** Whether an epoch is over: with two connections, the slower one can still speak of it. */
    #isFormer(subscription, epoch) {
        return this.move !== null && subscription.former_epochs.includes(epoch);
    }

    /** After a migration: the one connection that is left says which epoch is the present one. */
    #agreeOnEpochs(connection) {
        for (const [sub, link] of connection.links) {
            const subscription = this.subscriptions.get(sub);
            const is_confirmed = link.epoch !== null && subscription.received !== null;
            if (is_confirmed && link.epoch !== subscription.received.epoch) {
                this.#onHole(connection, link, subscription);
            }
        }
    }

    /** Read again from `received`: at once, but when that has not helped, after a while. */
    #onHole(connection, link, subscription) {
        if (link.pending || link.failed) return;
        const { epoch, offset } = subscription.received;
        const hole_at = `${epoch} ${offset}`;
        if (link.hole_at === hole_at) {
            link.failed = true;
            this.#retryLater(subscription, BACKOFF_S);
        } else {
            link.hole_at = hole_at;
            this.#subscribeAgain(connection, subscription);
        }
    }

    #onGap(connection, frame) {
        const subscription = this.subscriptions.get(connection.by_s.get(frame.s));
        if (!subscription) return;
        const link = connection.links.get(subscription.id);
        const item = { type: "gap", reason: frame.reason };
        for (const field of ["from", "to", "epoch", "offset", "count"]) {
            if (given(frame[field])) item[field] = frame[field];
        }
        if (!link.live) this.#onLoggedGap(connection, link, subscription, item);
        else if (this.move?.conn === connection.id) this.#hold(link, item);
        else this.#enqueueLive(subscription, item);
    }

    #onLoggedGap(connection, link, subscription, item) {
        if (item.epoch === undefined) {
            this.#onBadFrame(connection, "gap: no epoch of a logged interest");
            return;
        }
        link.epoch = item.epoch;
        const { received, former_epochs } = subscription;
        if (this.#isFormer(subscription, item.epoch)) return;
        if (item.epoch === received?.epoch) {
            // Otherwise a gap about what was received before is a copy.
            if (!link.went_back && item.offset <= received.offset) return;
            if (!link.went_back && item.from !== undefined) item.from = received.offset + 1;
            link.went_back = false;
        }
        if (this.#pauseIfFull(subscription)) return;
        if (received !== null && item.epoch !== received.epoch) {
            former_epochs.push(received.epoch);
            if (former_epochs.length > FORMER_EPOCHS_MAX) former_epochs.shift();
        }
        subscription.received = { epoch: item.epoch, offset: item.offset };
        if (subscription.roster !== null) this.#onMembersGap(subscription, item);
        else this.#enqueue(subscription, item);
    }

    #onLiveData(connection, link, subscription, item, numbered) {
        if (numbered) [item.publisher, item.number] = numbered;
        const last = subscription.numbers.get(item.publisher);
        if (numbered && last !== undefined && item.number <= last) return;
        if (this.move?.conn !== connection.id) this.#handOutLive(subscription, item);
        else if (numbered && last !== undefined && item.number === last + 1) this.#handOutLive(subscription, item);
        else if (numbered || this.move.left) this.#hold(link, item);
    }

    #hold(link, item) {
        if (link.held.length < HELD_MAX) link.held.push(item);
        else link.held_lost += item.count ?? 1;
    }

    #release(connection) {
        for (const [sub, link] of connection.links) {
            const subscription = this.subscriptions.get(sub);
            const { held, held_lost } = link;
            link.held = [];
            link.held_lost = 0;
            for (const item of held) {
                const last = item.number === undefined ? undefined : subscription.numbers.get(item.publisher);
                if (item.type === "gap") this.#enqueueLive(subscription, item);
                else if (last === undefined || item.number > last) this.#handOutLive(subscription, item);
            }
            if (held_lost) this.#enqueueLive(subscription, { type: "gap", reason: "held_full", count: held_lost });
        }
    }

    #handOutLive(subscription, item) {
        if (item.publisher !== undefined) {
            subscription.numbers.delete(item.publisher);
            subscription.numbers.set(item.publisher, item.number);
            if (subscription.numbers.size > PUBLISHERS_MAX) dropFirst(subscription.numbers);
        }
        this.#enqueueLive(subscription, item);
    }

    /** Queue an item of a live interest; when the queue is full, count it in a gap. */
    #enqueueLive(subscription, item) {
        const { queue } = subscription;
        if (queue.length < this.queue_max) {
            this.#enqueue(subscription, item);
            return;
        }
        const tail = queue.at(-1);
        const lost = item.type === "gap" ? (item.count ?? 0) : 1;
        if (queue.length > 1 && tail.reason === "queue_full") tail.count += lost;
        else this.#enqueue(subscription, { type: "gap", reason: "queue_full", count: lost });
    }

    #pauseIfFull(subscription) {
        if (subscription.paused) return true;
        if (subscription.queue.length < this.queue_max) return false;
        if (!subscription.present) this.#unlink(subscription);
        this.#clearTimer(`retry:${subscription.id}`);
        subscription.paused = true;
        return true;
    }

    #enqueue(subscription, item) {
        subscription.queue.push(item);
        this.#handOver(subscription);
    }

    #handOver(subscription) {
        if (subscription.busy || subscription.queue.length === 0 || this.state === "closed") return;
        subscription.busy = true;
        this.#act("hand_over", { sub: subscription.id, item: { ...subscription.queue[0] } });
    }

    #onHandled(sub) {
        const subscription = this.subscriptions.get(sub);
        if (!subscription?.busy) return;
        subscription.busy = false;
        const item = subscription.queue.shift();
        const is_logged = item.epoch !== undefined && subscription.received !== null;
        if (is_logged) this.#movePosition(subscription, { epoch: item.epoch, offset: item.offset });
        if (subscription.paused && subscription.queue.length * 2 <= this.queue_max) {
            subscription.paused = false;
            for (const connection of this.connections.values()) {
                if (connection.links.has(subscription.id)) this.#subscribeAgain(connection, subscription);
                else this.#subscribeOn(connection, subscription);
            }
        }
        this.#handOver(subscription);
    }

    #movePosition(subscription, position) {
        subscription.position = copied(position);
        this.positions.delete(subscription.key);
        this.positions.set(subscription.key, copied(position));
        if (this.positions.size > POSITIONS_MAX) dropFirst(this.positions);
        if (this.state === "closed") this.#save(); // The last handler finishes after the end.
        else this.#saveSoon();
        if (!this.timers.has("ack")) this.#acknowledge();
    }

    #saveSoon() {
        if (!this.timers.has("save")) this.#setTimer("save", SAVE_S);
    }

    #save() {
        this.#clearTimer("save");
        const positions = Object.fromEntries(this.positions);
        this.#act("save", { state: { session: this.session, generation: this.generation, positions } });
    }

    /** Send the positions of stored subscriptions that have moved, and do so again after `ack_s` if there were any. */
    #acknowledge() {
        const connection = this.#main();
        if (connection?.phase !== "connected") return;
        const p = {};
        for (const [sub, link] of connection.links) {
            const { position, stored } = this.subscriptions.get(sub);
            if (!stored || link.s === null || position === null || position.epoch !== link.epoch) continue;
            if (position.epoch === link.acked?.epoch && position.offset <= link.acked.offset) continue;
            link.acked = copied(position);
            p[link.s] = copied(position);
        }
        if (Object.keys(p).length === 0) return;
        this.#send(connection, { type: "ack", p });
        this.#setTimer("ack", connection.ack_s);
    }

    // Presence

    #askMembers() {
        const connection = this.#main();
        if (connection?.phase !== "connected") return;
        for (const { id, interest, roster } of this.subscriptions.values()) {
            if (roster === null || roster.listed !== null || roster.asked === connection.id) continue;
            const link = connection.links.get(id);
            if (!link || link.s === null || link.pending || link.failed) continue;
            const ref = connection.next_ref;
            connection.next_ref += 1;
            connection.refs.set(ref, { members: id });
            roster.asked = connection.id;
            this.#send(connection, { type: "members", ref, channel: interest.presence });
        }
    }

    #askAgain(subscription) {
        if (subscription) subscription.roster.asked = null;
    }

    #onMembers(connection, { ref, members, count, epoch, offset }) {
        const subscription = this.#asked(connection, ref);
        if (!subscription) return;
        const { id, received, roster } = subscription;
        if (received.epoch !== epoch) {
            this.#setTimer(`members:${id}`, BACKOFF_S); // The log was lost: its gap comes first.
            return;
        }
        const { waiting } = roster;
        Object.assign(roster, { listed: { epoch, offset }, asked: null, waiting: [] });
        this.#act("members", { sub: id, members, count });
        for (const { change, at } of waiting) this.#reportChange(subscription, change, at);
    }

    /** The presence whose list was asked for with this number, if its answer still counts. */
    #asked(connection, ref) {
        const sub = connection.refs.get(ref)?.members;
        if (sub === undefined) return null;
        connection.refs.delete(ref);
        const subscription = this.subscriptions.get(sub);
        const { asked, listed } = subscription?.roster ?? {};
        return asked === connection.id && listed === null ? subscription : null;
    }

    #onMemberChange(subscription, item) {
        const { received, roster } = subscription;
        const change = readChange(item);
        if (change === null) return;
        if (roster.listed !== null) {
            this.#reportChange(subscription, change, received);
        } else {
            roster.waiting.push({ change, at: received });
            if (roster.waiting.length > CHANGES_MAX) Object.assign(roster, { asked: null, waiting: [] });
        }
    }

    #reportChange({ id, roster }, change, at) {
        const { epoch, offset } = roster.listed;
        if (at.epoch === epoch && at.offset > offset) this.#act("member", { sub: id, ...change });
    }

    #onMembersGap(subscription, { type: _, ...gap }) {
        this.#clearTimer(`members:${subscription.id}`);
        Object.assign(subscription.roster, { listed: null, asked: null, waiting: [] });
        this.#act("members_gap", { sub: subscription.id, gap });
    }

    // Publications

    #onPublish({ id, channel, d, b }) {
        const refuse = (code, message, retry) => this.#act("publish_failed", { id, error: { code, message, retry } });
        if (this.#ended()) {
            refuse("closed", "the client is closed", "never");
        } else if (this.unsent.length + this.unanswered >= PUBLISHES_MAX) {
            refuse("publish_queue_full", `${PUBLISHES_MAX} publications wait for an answer`, "later");
        } else {
            this.unsent.push({ id, frame: b === undefined ? { channel, d } : { channel, b } });
            this.#sendUnsent();
        }
    }

    #sendUnsent() {
        const connection = this.#main();
        if (connection?.phase !== "connected") return;
        for (const { id, frame } of this.unsent.splice(0)) {
            const ref = connection.next_ref;
            connection.next_ref += 1;
            connection.refs.set(ref, { publish: id });
            this.unanswered += 1;
            this.#send(connection, { type: "publish", ref, ...frame });
        }
    }

    #onPublished(connection, { ref, epoch, offset }) {
        const id = connection.refs.get(ref)?.publish;
        if (id === undefined) return;
        connection.refs.delete(ref);
        this.unanswered -= 1;
        this.#act("published", given(offset) ? { id, epoch, offset } : { id });
    }

    // Errors

    #onError(connection, frame) {
        const { code, message, retry } = frame;
        const retry_after_s = (frame.retry_after_ms ?? 0) / 1000;
        if (!given(frame.ref)) {
            connection.retry_after_s = retry_after_s;
            if (TOKEN_ERRORS.has(code) && connection.phase === "connected") this.#onTokenRefused(code, message);
            if (CLOSING_ERRORS.has(code)) connection.last_error = { code, message };
            else this.#reportError(code, message, retry);
            return;
        }
        const request = connection.refs.get(frame.ref);
        if (!request) return;
        if (request.members !== undefined) {
            const subscription = this.#asked(connection, frame.ref);
            if (subscription) this.#setTimer(`members:${subscription.id}`, Math.max(BACKOFF_S, retry_after_s));
            return;
        }
        connection.refs.delete(frame.ref);
        if (request.publish !== undefined) {
            this.unanswered -= 1;
            this.#act("publish_failed", { id: request.publish, error: { code, message, retry } });
        } else if (connection.links.get(request.sub)?.ref === frame.ref) {
            this.#onSubscriptionError(connection, request, { code, message, retry }, retry_after_s);
        }
    }

    #onSubscriptionError(connection, request, error, retry_after_s) {
        const subscription = this.subscriptions.get(request.sub);
        if (this.move?.conn === connection.id && !this.move.left && request.in_connect) {
            this.#abandonMove(); // It refuses: the old broker may still allow it.
            return;
        }
        const link = connection.links.get(subscription.id);
        connection.by_s.delete(link.s);
        connection.links.delete(subscription.id);
        const ended = error.retry === "never";
        this.#act("subscription_failed", { sub: subscription.id, error, ended });
        if (ended) this.#removeSubscription(subscription);
        else this.#retryLater(subscription, retry_after_s);
        this.#leaveIfReady();
    }

    // Migration

    #onMove(connection, frame) {
        if (connection.id !== this.current || frame.to.length === 0) return;
        if (this.move !== null && this.move.conn !== null) return; // One at a time.
        this.move = { to: frame.to, index: 0, ticket: frame.ticket ?? null, conn: null, confirmed: false, left: false };
        this.#setTimer("move", 0, frame.within_ms / 1000);
        this.#setTimer("move_deadline", frame.deadline_ms / 1000);
    }

    #openMove() {
        const { to, index, ticket } = this.move;
        this.move.conn = this.#open(to[index], ticket).id;
    }

    #onNewLost(connection) {
        const { to, index } = this.move;
        this.move.conn = null;
        if (connection.connected_at === null && index + 1 < to.length) {
            this.move.index += 1;
            this.#openMove();
        } else {
            this.#clearMoveTimers();
            this.move = null;
            this.#stay();
        }
    }

    /** Stay at the old broker. What is held was, or will be, delivered by it. */
    #abandonMove() {
        const { conn } = this.move;
        this.#clearMoveTimers();
        this.move = null;
        if (conn === null) return;
        const connection = this.connections.get(conn);
        this.#closeQuietly(connection, CLOSE_MOVE_FAILED);
        this.#stay();
    }

    /** A migration has failed: the old connection is the only one again. */
    #stay() {
        const connection = this.connections.get(this.current);
        this.#agreeOnEpochs(connection);
        // After `leave` the old broker got no subscriptions.
        for (const subscription of this.subscriptions.values()) this.#subscribeOn(connection, subscription);
        this.#sendUnsent();
    }

    #clearMoveTimers() {
        for (const timer of ["move", "move_deadline", "bye"]) this.#clearTimer(timer);
    }

    #onMovedIn(connection) {
        if (this.move?.conn !== connection.id) return;
        this.move.confirmed = true;
        this.#leaveIfReady();
    }

    /** Whether the new connection has all that the old one delivers, also what was subscribed to after `connect`. */
    #isReady() {
        const { links } = this.connections.get(this.move.conn);
        if ([...links.values()].some(({ pending }) => pending)) return false;
        return [...this.connections.get(this.current).links].every(([sub, { s }]) => s === null || links.has(sub));
    }

    #leaveIfReady() {
        if (!this.move?.confirmed || this.move.left || !this.#isReady()) return;
        this.#clearTimer("move_deadline");
        const old = this.connections.get(this.current);
        old.leaves += 1;
        this.#send(old, { type: "leave" });
        this.move.left = true;
        this.#setTimer("bye", BYE_S_MAX);
        this.#clearTimer("ack");
        this.#acknowledge();
    }

    #onBye(connection) {
        connection.leaves -= 1;
        // The answer to the `leave` of an earlier move, whose new connection was lost, says nothing about this one.
        if (!this.#isLeft(connection) || connection.leaves > 0) return;
        const replacement = this.connections.get(this.move.conn);
        this.#clearMoveTimers();
        this.move = null;
        this.current = replacement.id;
        this.#release(replacement);
        this.#closeQuietly(connection);
        this.#onMoved(connection, replacement);
    }

    /** The old connection was lost before `bye`: go on with the new one, as far as it is. */
    #promote(replacement, lost) {
        this.current = replacement.id;
        this.#missLive(lost, replacement);
        this.#release(replacement);
        if (replacement.phase === "connected") this.#onMoved(lost, replacement);
        else this.#changeState("connecting");
    }

    #onMoved(from, to) {
        this.#agreeOnEpochs(to);
        this.alternates = to.alternates;
        this.#onMainConnected();
        this.#act("moved", { from: from.broker, to: to.broker });
    }

    /** Remember, or report, that live publications were missed when `lost` was lost. */
    #missLive(lost, replacement = null) {
        for (const [sub, link] of lost.links) {
            const subscription = this.subscriptions.get(sub);
            if (!link.live || !subscription.live) continue;
            subscription.missed = !replacement?.links.get(sub)?.live;
            if (!subscription.missed) this.#enqueueLive(subscription, { type: "gap", reason: "reconnected" });
        }
    }
}

function assert(condition, message) {
    if (!condition) throw new Error(`broken invariant: ${message}`);
}

/** Whether a subscription has no links, as its handler is behind. */
function isAway(subscription) {
    return subscription !== undefined && subscription.paused && !subscription.present;
}

/** What an event subscribes to. */
function interestOf({ channel, presence, query, params }) {
    if (channel !== undefined) return { channel };
    return presence === undefined ? { query, params: params ?? {} } : { presence };
}

/** The join or leave that a publication of a presence holds; null for something else. */
function readChange({ d }) {
    try {
        const [[change, { user, member }]] = Object.entries(JSON.parse(d));
        const is_change = (change === "join" || change === "leave") && isText(user) && isText(member);
        return is_change ? { change, user, member } : null;
    } catch {
        return null;
    }
}

/** @param {number} attempts */
function backoff_s_max(attempts) {
    return Math.min(BACKOFF_S_MAX, BACKOFF_S * 2 ** Math.min(attempts, 16));
}

const copied = (position) => (position === null ? null : { epoch: position.epoch, offset: position.offset });
const unique = (items) => [...new Set(items)];

function dropFirst(map) {
    map.delete(map.keys().next().value);
}

/**
 * The claim `exp` of a JSON Web Token, unchecked; null where it cannot be read.
 * @param {string | null} token
 */
function expiry(token) {
    try {
        const payload = token.split(".")[1].replaceAll("-", "+").replaceAll("_", "/");
        const { exp } = JSON.parse(atob(payload));
        return Number.isFinite(exp) ? exp : null;
    } catch {
        return null;
    }
}

/** The error after which the client does not come again; `code` is null for no error, undefined to come again. */
function finalError(connection, close_code, reason, has_token) {
    const announced = connection.last_error;
    const message = announced?.message || reason || `the broker closed the connection with ${close_code}`;
    if (close_code === TOKEN_EXPIRED && !has_token) return { code: "token_expired", message };
    if (!FINAL_CLOSE_CODES.has(close_code)) return { code: undefined, message };
    const code = FINAL_CLOSE_CODES.get(close_code);
    return { code: code === null ? null : (announced?.code ?? code), message };
}

// ---------------------------------------------------------------------------------------------------------------------
// The client

/** An error of the client. `code` is one of `docs/brokers.md`, or of this module. */
export class DynamothError extends Error {
    /** @param {ErrorInfo} info @param {{cause?: unknown}} [options] */
    constructor({ code, message, retry, close_code }, options) {
        super(message, options);
        this.name = "DynamothError";
        this.code = code;
        /** Whether trying again can help: `never`, `later` or `elsewhere`. */
        this.retry = retry;
        /** The close code of the connection, where the error is about one. */
        this.closeCode = close_code ?? null;
    }
}

/** One subscription. Made by `Dynamoth.subscribe`. */
export class Subscription {
    #client;

    /** @param {any} client @param {Interest} interest */
    constructor(client, interest) {
        this.#client = client;
        this.interest = interest;
    }

    /**
     * The last publication that the handler has finished; null for a live interest, and before the broker has answered.
     * @returns {Position | null}
     */
    get position() {
        return this.#client.position(this);
    }

    /** Hand over nothing more, not even what waits for the handler; forget the stored position. */
    unsubscribe() {
        this.#client.unsubscribe(this);
    }
}

/**
 * Who is present on a channel. Made by `Dynamoth.presence`.
 *
 * `members` maps each member to its user, and is current; `count` counts all, also where there are too many for a list.
 * Both are empty until `onChange` gets `list`.
 */
export class Presence {
    #client;
    #is_listed = false;

    /** @param {any} client @param {string} channel */
    constructor(client, channel) {
        this.#client = client;
        this.channel = channel;
        /** @type {Map<string, string>} */
        this.members = new Map();
        this.count = 0;
    }

    /** Watch no more. */
    close() {
        this.#client.unsubscribe(this);
    }

    /** For `Dynamoth` only. Returns the changes that make the difference. @param {any} action */
    apply(action) {
        if (action.type === "members") {
            return this.#begin(new Map(action.members.map(([user, member]) => [member, user])), action.count);
        }
        const { change: type, user, member } = action;
        if (type === "join") this.members.set(member, user);
        else this.members.delete(member);
        this.count += type === "join" ? 1 : -1;
        return [{ type, user, member }];
    }

    #begin(members, count) {
        const before = this.members;
        const was_complete = this.count === before.size;
        const difference = (type, these, those) => {
            const only_these = [...these].filter(([member]) => !those.has(member));
            return only_these.map(([member, user]) => ({ type, user, member }));
        };
        this.members = members;
        this.count = count;
        // Who is in one part of the members, and not in the other one, may be present all the time.
        const is_known = this.#is_listed && was_complete && count === members.size;
        this.#is_listed = true;
        if (!is_known) return [{ type: "list" }];
        return [...difference("leave", before, members), ...difference("join", members, before)];
    }
}

/**
 * A session at the edge brokers. It connects at once, and again whenever its connection is lost.
 *
 * Events (`addEventListener`; each is a `CustomEvent`):
 *
 * | type | `detail` |
 * | --- | --- |
 * | `state` | `{state, url, broker, code?, lost?, reason?}`, see below; `code` is the last close code |
 * | `moved` | `{from, to}`: names of brokers; another one serves the session now |
 * | `gap` | `{subscription, gap}`: for gaps of subscriptions without `onGap` |
 * | `error` | a `DynamothError`; `code` is `handler_failed` (with `cause`) for an exception of a handler |
 *
 * States: `connecting`, `connected`, `waiting` (for the next attempt), `stopped` (a broker refused, or with code 4004 a
 * newer connection of the session took over; the client does not come again) and `closed` (`close` was called).
 *
 * Errors, and why no broker serves, are warnings on the console, too: each once, whatever is listened to.
 *
 * Guarantees. Publications of a subscription are handed over in order, each once, the next one when the promise of the
 * handler for the last one has settled. What is missing is reported as a gap, in its place. An exception of a handler
 * is reported as an error and does not stop delivery: the publication counts as handled, and the position moves on.
 * Positions are stored every 0.2 s and when the page is hidden; after a crash, what was handled since is handed over
 * again.
 *
 * Backpressure. Up to `queueMax` publications wait for the handler of a subscription. Then a logged subscription pauses
 * and reads on from its log when half of the queue is free. A live one drops the newest, and a gap takes their place. A
 * handler whose promise never settles stops its own subscription, and no other.
 *
 * Sessions. Two pages with the same session end each other's connection. By default each tab has a session of its own,
 * which a reload keeps.
 */
export class Dynamoth extends EventTarget {
    #machine = null;
    #backlog = [];
    #is_running = false;
    #sockets = new Map();
    #timers = new Map();
    /** @type {Map<number, {subscription: Subscription, key: string, handler: Function, onGap: any, onError: any}>} */
    #subscriptions = new Map();
    #ids = new Map();
    #publishes = new Map();
    #next_id = 1;
    #warnings = new Set();
    #options;
    #storage;
    #onPageHide = () => this.#feed({ type: "flush" });

    /**
     * @param {string[]} urls brokers, `wss://HOST/connect`, in the order in which they are tried
     * @param {object} [options]
     * @param {string} [options.session] up to 64 letters, digits, `-` and `_`; by default random, kept for this tab
     * @param {() => Promise<string>} [options.getToken] called for the first connection, before a token expires, and
     *     after it has; without it the client connects without a token
     * @param {{load: () => any, save: (state: StoredSession) => any} | null} [options.storage] `load` returns what was
     *     saved last (or a promise of it), or null. By default localStorage, key `dynamoth:SESSION`; with null as
     *     storage nothing is stored
     * @param {() => number} [options.random] like Math.random
     * @param {number} [options.queueMax] publications that may wait for one handler, at least 1
     * @param {typeof WebSocket} [options.WebSocket] another implementation
     */
    constructor(urls, options = {}) {
        super();
        if (!Array.isArray(urls) || urls.length === 0) throw new TypeError("urls must name at least one broker");
        if (options.session !== undefined && !/^[\w-]{1,64}$/.test(options.session)) {
            throw new TypeError("session must have 1 to 64 letters, digits, - and _");
        }
        this.#options = { random: Math.random, queueMax: QUEUE_MAX, WebSocket: globalThis.WebSocket, ...options };
        if (!(this.#options.queueMax >= 1)) throw new TypeError("queueMax must be at least 1");
        this.#storage = options.storage === undefined ? tabStorage(options.session) : options.storage;
        /** @type {string} `idle` until the stored session is loaded, then as in the event `state` */
        this.state = "idle";
        /** @type {string | null} the name of the broker that serves the session */
        this.broker = null;
        this.#backlog.push({ type: "start" });
        globalThis.addEventListener?.("pagehide", this.#onPageHide);
        this.#load([...urls]);
    }

    /** The session's id; null until it is loaded. */
    get session() {
        return this.#machine?.session ?? null;
    }

    /**
     * Subscribe to a channel or a query.
     * @param {Interest} interest a client has at most one subscription of each interest
     * @param {(publication: Publication, subscription: Subscription) => any} handler may return a promise: the next
     *     publication waits for it
     * @param {object} [options]
     * @param {Position | "new"} [options.since] where delivery begins; by default behind the stored position, and if
     *     there is none from now on
     * @param {boolean} [options.stored] brokers keep the position, for this session and the user of the token: a client
     *     that has the same ones begins behind what was handled, on any device. The channel needs a log, and the client
     *     a token. At first it begins with what is published from now on. `since` may only be a position then
     * @param {(gap: Gap, subscription: Subscription) => any} [options.onGap] called in place of missing publications;
     *     as with `handler`, the next publication waits for it
     * @param {(error: DynamothError, subscription: Subscription) => void} [options.onError] with `retry` `never` the
     *     subscription has ended; otherwise the client tries again
     * @returns {Subscription}
     * @throws {TypeError} for parameters that no broker takes
     * @throws {DynamothError} `duplicate` for an interest that is subscribed to, `closed` after the end
     */
    subscribe(interest, handler, { since, stored = false, onGap, onError } = {}) {
        const key = interestKey(interest);
        if (typeof handler !== "function") throw new TypeError("handler must be a function");
        if (since !== undefined && since !== "new" && !(isText(since?.epoch) && isCount(since.offset))) {
            throw new TypeError('since must be "new" or a position {epoch, offset}');
        }
        if (stored && since === "new") throw new TypeError("a stored subscription does not begin with what is new");
        const copy = "channel" in interest
            ? { channel: interest.channel, ...(interest.present ? { present: true } : {}) }
            : { query: interest.query, params: { ...interest.params } };
        const made = (actions) => new Subscription(actions, copy);
        const [id, subscription] = this.#add(key, made, { handler, onGap, onError });
        const options = { ...(since === undefined ? {} : { since }), ...(stored ? { stored } : {}) };
        this.#feed({ type: "subscribe", sub: id, ...copy, ...options });
        return subscription;
    }

    /**
     * Watch who is present on a channel: those who have subscribed to it with `present`.
     * @param {string} channel
     * @param {(change: {type: "list"} | {type: "join" | "leave", user: string, member: string} | {type: "gap"} & Gap,
     *     presence: Presence) => void} onChange called with `list` once `members` is known, then with each change. The
     *     joins and leaves that make the difference follow a `gap`; where there are more members than a list has
     *     (10,000), `list` follows it
     * @param {object} [options]
     * @param {(error: DynamothError, presence: Presence) => void} [options.onError] as with `subscribe`
     * @returns {Presence}
     * @throws {TypeError} for a name that no broker takes
     * @throws {DynamothError} `duplicate` for a channel that is watched, `closed` after the end
     */
    presence(channel, onChange, { onError } = {}) {
        const key = interestKey({ presence: channel });
        if (typeof onChange !== "function") throw new TypeError("onChange must be a function");
        const made = (actions) => new Presence(actions, channel);
        const [id, presence] = this.#add(key, made, { handler: onChange, onError });
        this.#feed({ type: "subscribe", sub: id, presence: channel });
        return presence;
    }

    #add(key, make, handlers) {
        this.#refuseWhenEnded();
        if (this.#ids.has(key)) {
            const message = "there is a subscription of this interest; a client has at most one";
            throw new DynamothError({ code: "duplicate", message, retry: "never" });
        }
        const id = this.#next_id++;
        const subscription = make(this.#actions(id));
        this.#subscriptions.set(id, { subscription, key, ...handlers });
        this.#ids.set(key, id);
        return [id, subscription];
    }

    /**
     * Publish. Without a connection it waits for one, so a caller that cannot wait must set its own limit.
     * @param {string} channel
     * @param {string | Uint8Array} payload
     * @returns {Promise<{epoch?: string, offset?: number}>} resolved when the broker has published it, with its offset
     *     where the channel is logged
     * @throws {DynamothError} `unknown_outcome` when the connection was lost first: it is published or not;
     *     `publish_queue_full` when 1000 calls wait; `closed` after the end; and what the broker refuses
     */
    async publish(channel, payload) {
        checkedText(channel, "channel");
        const body = payload instanceof Uint8Array ? { b: toBase64(payload) } : { d: checkedText(payload, "payload") };
        const id = this.#next_id++;
        return new Promise((resolve, reject) => {
            this.#publishes.set(id, { resolve, reject });
            this.#feed({ type: "publish", id, channel, ...body });
        });
    }

    /** End the session on this page: close the connection, hand over nothing more, and store the positions. */
    close() {
        globalThis.removeEventListener?.("pagehide", this.#onPageHide);
        this.#feed({ type: "close" });
    }

    #actions(id) {
        return {
            position: () => this.#machine?.position(id) ?? null,
            unsubscribe: () => {
                this.#forgetSubscription(id);
                this.#feed({ type: "unsubscribe", sub: id });
            },
        };
    }

    #refuseWhenEnded() {
        if (this.state !== "stopped" && this.state !== "closed") return;
        throw new DynamothError({ code: "closed", message: `the client is ${this.state}`, retry: "never" });
    }

    #forgetSubscription(id) {
        this.#ids.delete(this.#subscriptions.get(id)?.key);
        this.#subscriptions.delete(id);
    }

    /** Make the machine; at once unless `storage` is asynchronous. */
    #load(urls) {
        const begin = (stored) => {
            const { session, getToken, queueMax } = this.#options;
            this.#machine = new SessionMachine({
                urls, generation: stored?.generation ?? 0, positions: stored?.positions ?? {},
                session: session ?? stored?.session ?? randomSession(),
                has_token: getToken !== undefined, queue_max: queueMax,
            });
            queueMicrotask(() => this.#run()); // Listeners can be added before the first event.
        };
        const fail = (cause) => {
            begin(null);
            const message = "the stored session cannot be loaded";
            queueMicrotask(() => this.#onError({ code: "storage_failed", message, retry: "never" }, cause));
        };
        try {
            const stored = this.#storage?.load() ?? null;
            if (typeof stored?.then === "function") stored.then(begin, fail);
            else begin(stored);
        } catch (cause) {
            fail(cause);
        }
    }

    #feed(event) {
        this.#backlog.push(event);
        this.#run();
    }

    /** Handle the events one after the other: actions can call handlers, which can make events. */
    #run() {
        if (this.#machine === null || this.#is_running) return;
        this.#is_running = true;
        try {
            while (this.#backlog.length > 0) {
                for (const action of this.#machine.handle(this.#backlog.shift(), now_s())) this.#perform(action);
            }
        } finally {
            this.#is_running = false;
        }
    }

    #perform(action) {
        switch (action.type) {
            case "open": this.#open(action.conn, action.url); break;
            case "send": this.#send(action.conn, action.frame); break;
            case "close": this.#closeSocket(action); break;
            case "set_timer": this.#setTimer(action); break;
            case "clear_timer": clearTimeout(this.#timers.get(action.timer)); break;
            case "hand_over": this.#handOver(action.sub, action.item); break;
            case "members": case "member": this.#onMembers(action); break;
            case "members_gap": this.#report(action.sub, [{ type: "gap", ...action.gap }]); break;
            case "get_token": this.#getToken(); break;
            case "save": this.#save(action.state); break;
            case "published": this.#settle(action.id)?.resolve(receipt(action)); break;
            case "publish_failed": this.#settle(action.id)?.reject(new DynamothError(action.error)); break;
            case "subscription_failed": this.#onSubscriptionFailed(action); break;
            case "state": this.#onState(action); break;
            case "moved": this.#dispatch("moved", { from: action.from, to: action.to }); break;
            case "error": this.#onError(action.error); break;
            case "warn": this.#warn(action.message); break;
            default: throw new TypeError(`unknown action ${action.type}`);
        }
    }

    #dispatch(type, detail) {
        this.dispatchEvent(new CustomEvent(type, { detail }));
    }

    #open(conn, url) {
        let socket;
        try {
            socket = new this.#options.WebSocket(url, SUBPROTOCOL);
        } catch (error) {
            this.#backlog.push({ type: "closed", conn, code: 1006, reason: String(error) }); // The URL is none.
            return;
        }
        socket.binaryType = "arraybuffer";
        socket.onopen = () => this.#feed({ type: "opened", conn });
        socket.onmessage = ({ data }) => this.#feed(parsed(conn, data));
        socket.onclose = ({ code, reason }) => {
            this.#sockets.delete(conn);
            this.#feed({ type: "closed", conn, code, reason });
        };
        this.#sockets.set(conn, socket);
    }

    #send(conn, frame) {
        const socket = this.#sockets.get(conn);
        if (socket?.readyState === 1) socket.send(JSON.stringify(frame)); // Otherwise `closed` is under way.
    }

    #closeSocket({ conn, code, reason }) {
        const socket = this.#sockets.get(conn);
        if (!socket) return;
        this.#sockets.delete(conn);
        socket.onopen = socket.onmessage = socket.onclose = null;
        socket.close(code, reason);
    }

    #setTimer({ timer, delay_s_min, delay_s_max }) {
        clearTimeout(this.#timers.get(timer));
        const delay_s = delay_s_min + (delay_s_max - delay_s_min) * this.#options.random();
        const due = () => {
            this.#timers.delete(timer);
            this.#feed({ type: "timer", timer });
        };
        // Browsers take no more than 2^31 ms. Only tokens live that long, and may be refreshed early.
        this.#timers.set(timer, setTimeout(due, Math.min(delay_s * 1000, 2 ** 31 - 1)));
    }

    async #handOver(id, item) {
        const entry = this.#subscriptions.get(id);
        if (!entry) return;
        const { subscription, handler, onGap } = entry;
        try {
            if (item.type === "publication") await handler(publication(item), subscription);
            else if (onGap) await onGap(gap(item), subscription);
            else this.#dispatch("gap", { subscription, gap: gap(item) });
        } catch (cause) {
            this.#onError({ code: "handler_failed", message: `a handler has failed: ${cause}`, retry: "never" }, cause);
        }
        this.#feed({ type: "handled", sub: id });
    }

    #onMembers(action) {
        const presence = this.#subscriptions.get(action.sub)?.subscription;
        if (presence) this.#report(action.sub, presence.apply(action));
    }

    #report(id, changes) {
        for (const change of changes) {
            const entry = this.#subscriptions.get(id); // Each call can end it.
            try {
                entry?.handler(change, entry.subscription);
            } catch (cause) {
                const message = `a handler has failed: ${cause}`;
                this.#onError({ code: "handler_failed", message, retry: "never" }, cause);
            }
        }
    }

    async #getToken() {
        try {
            const token = checkedText(await this.#options.getToken(), "the token").trim(); // A file ends with a new line.
            this.#feed({ type: "token", token });
        } catch (error) {
            this.#feed({ type: "token_failed", message: `getToken has failed: ${error}` });
        }
    }

    async #save(state) {
        try {
            await this.#storage?.save(state);
        } catch (cause) {
            this.#onError({ code: "storage_failed", message: "the session cannot be stored", retry: "later" }, cause);
        }
    }

    #settle(id) {
        const publish = this.#publishes.get(id);
        this.#publishes.delete(id);
        return publish;
    }

    #onSubscriptionFailed({ sub, error, ended }) {
        const entry = this.#subscriptions.get(sub);
        if (ended) this.#forgetSubscription(sub);
        try {
            entry?.onError?.(new DynamothError(error), entry.subscription);
        } catch (cause) {
            this.#onError({ code: "handler_failed", message: `a handler has failed: ${cause}`, retry: "never" }, cause);
        }
        this.#onError(error);
    }

    #onState({ type, ...detail }) {
        this.state = detail.state;
        this.broker = detail.broker;
        if (detail.state === "waiting" && detail.lost !== undefined) {
            this.#warn(`no broker serves this page, and the client tries again: ${whyLost(detail)}`);
        }
        if (detail.state === "connected") this.#warnings.clear();
        this.#dispatch(type, detail);
    }

    #warn(text, ...more) {
        if (this.#warnings.has(text) || this.#warnings.size >= WARNINGS_MAX) return;
        this.#warnings.add(text);
        console.warn(`dynamoth: ${text}`, ...more);
    }

    #onError(error, cause) {
        this.#warn(`${error.code}: ${error.message}`, ...(cause === undefined ? [] : [cause]));
        this.#dispatch("error", new DynamothError(error, cause === undefined ? undefined : { cause }));
    }
}

/** What a page can know of a lost connection, and what to look at. Browsers do not say why one was not opened. */
function whyLost({ lost, code, reason }) {
    const url = lost.replace(/\/\/[^/]*@/, "//").replace(/\?.*/s, ""); // Without what may be secret.
    if (code !== LOST) return `${reason} (${url}, code ${code})`;
    if (reason) return `there is no connection to ${url}: ${reason}`;
    const origin = globalThis.location?.origin;
    const origins = origin === undefined ? "" : `, and is ${origin} among its broker.origins`;
    return `the connection to ${url} was lost or refused: does a broker listen there${origins}?`;
}

/** Seconds since 1970, which never go back, unlike Date.now(). */
function now_s() {
    return (performance.timeOrigin + performance.now()) / 1000;
}

function parsed(conn, data) {
    if (typeof data !== "string") return { type: "bad_frame", conn, message: "a binary frame" };
    try {
        return { type: "frame", conn, frame: JSON.parse(data) };
    } catch (error) {
        return { type: "bad_frame", conn, message: String(error) };
    }
}

function publication({ type: _, d, b, ...rest }) {
    return { data: d ?? fromBase64(b), ...rest };
}

function gap({ type: _, ...rest }) {
    return rest;
}

function receipt({ type: _, id: __, ...rest }) {
    return rest;
}

function fromBase64(text) {
    return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

function toBase64(bytes) {
    let binary = "";
    for (const byte of bytes) binary += String.fromCharCode(byte);
    return btoa(binary);
}

function randomSession() {
    const bytes = crypto.getRandomValues(new Uint8Array(16));
    return toBase64(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

const STORAGE_PREFIX = "dynamoth:";

/**
 * The default storage. The session's state is in localStorage. The session's id, if the application has none, is in
 * sessionStorage: a reload keeps it, and another tab has another one.
 * @param {string} [session]
 */
function tabStorage(session) {
    let localStorage, sessionStorage, known;
    try {
        ({ localStorage, sessionStorage } = globalThis);
        known = session ?? sessionStorage.getItem(`${STORAGE_PREFIX}session`);
        localStorage.getItem(STORAGE_PREFIX);
    } catch {
        return null; // Node.js has none; a browser can forbid it.
    }
    return {
        load() {
            removeOldSessions(localStorage);
            return known === null ? null : JSON.parse(localStorage.getItem(STORAGE_PREFIX + known));
        },
        save(state) {
            if (session === undefined) sessionStorage.setItem(`${STORAGE_PREFIX}session`, state.session);
            localStorage.setItem(STORAGE_PREFIX + state.session, JSON.stringify({ ...state, saved_at_ms: Date.now() }));
        },
    };
}

function removeOldSessions(storage) {
    for (const key of Object.keys(storage)) {
        if (!key.startsWith(STORAGE_PREFIX)) continue;
        const { saved_at_ms } = JSON.parse(storage.getItem(key));
        if (!(Date.now() - saved_at_ms <= STORED_MS_MAX)) storage.removeItem(key);
    }
}
