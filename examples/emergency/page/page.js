// One of the users: walks through the town, sends its place to the broker once a second, and shows what comes.

import { Dynamoth } from "./dynamoth.js";
import { bounds, nearest, stepper, way } from "./walk.js";

const SVG = "http://www.w3.org/2000/svg";
const LOCATION_MS = 1000;
const FRAME_MS = 100;
const WALK_M_PER_S = 1.4;
const TRAM_M_PER_S = 9;
const REPORT_SHOWN_MS = 120_000;
const LINES_MAX = 200;

/** The queries of the application, and which parameters a visitor chooses. */
const QUERIES = {
    reports_near_me: { title: "reports near me", needs: ["radius"] },
    reports_of_type_near_me: { title: "reports of a type near me", needs: ["type", "radius"] },
    shelters_near_me: { title: "shelters, if something is near me", needs: ["type", "radius"] },
    reports_of_type: { title: "reports of a type", needs: ["type"] },
    reports_near_place: { title: "reports of a type near a square", needs: ["type", "square", "radius"] },
    report_counts: { title: "number of reports near a square", needs: ["square", "radius"] },
    people_near_reports: { title: "people near reports of a type", needs: ["type"] },
};

const field = (id) => document.getElementById(id);
const words = (name) => name.replaceAll("_", " ");

async function login(token) {
    const response = await fetch("/login", { method: "POST", body: token });
    if (!response.ok) throw new Error(`no token: ${response.status}`);
    return response.json();
}

const world = await (await fetch("/world")).json();
let account = await login(sessionStorage.getItem("token") ?? "");
sessionStorage.setItem("token", account.token);
field("user").textContent = account.user;

// The map.

const box = bounds(world.crossings);
field("map").setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);

function draw(layer, kind, attributes, text = "") {
    const shape = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) shape.setAttribute(name, value);
    shape.textContent = text;
    field(layer).append(shape);
    return shape;
}

const point = (lat, lon) => box.point(lat, lon);
const points = world.crossings.map(([lat, lon]) => point(lat, lon));

for (const [here, beside] of world.neighbours.entries()) {
    for (const there of beside) {
        if (here > there) continue;
        const [[x1, y1], [x2, y2]] = [points[here], points[there]];
        draw("streets", "line", { x1, y1, x2, y2 });
    }
}
for (const [number, [lat, lon]] of world.squares.entries()) {
    const [x, y] = point(lat, lon);
    draw("squares", "circle", { cx: x, cy: y, r: 34 });
    draw("squares", "text", { x, y: y - 50 }, `square ${number + 1}`);
}
const shelters = new Map();
for (const { id, name, lat, lon } of world.shelters) {
    const [x, y] = point(lat, lon);
    const shape = draw("shelters", "rect", { x: x - 18, y: y - 18, width: 36, height: 36 });
    shape.append(document.createElementNS(SVG, "title"));
    shape.firstChild.textContent = name;
    shelters.set(id, shape);
}

function showReport({ id, type, severity, lat, lon }) {
    if (document.getElementById(`report ${id}`)) return;
    const [cx, cy] = point(lat, lon);
    const shape = draw("reports", "circle", { id: `report ${id}`, cx, cy, r: 16 + 8 * severity });
    shape.append(document.createElementNS(SVG, "title"));
    shape.firstChild.textContent = `${words(type ?? "report")}, severity ${severity}`;
    setTimeout(() => shape.remove(), REPORT_SHOWN_MS);
}

// Where the visitor is.

const begin = nearest(points, [box.width / 2, box.height / 2]);
const walk = stepper(points, begin);
const range = draw("me", "circle", { class: "range", r: 0 });
const goal = draw("me", "circle", { class: "goal", r: 40, visibility: "hidden" });
const me = draw("me", "circle", { r: 42 });

field("map").addEventListener("click", (event) => {
    const here = new DOMPoint(event.clientX, event.clientY).matrixTransform(field("map").getScreenCTM().inverse());
    const target = nearest(points, [here.x, here.y]);
    walk.follow(way(points, world.neighbours, walk.next, target));
    const [cx, cy] = points[target];
    for (const [name, value] of Object.entries({ cx, cy, visibility: "visible" })) goal.setAttribute(name, value);
});

let moved_ms = performance.now();
setInterval(() => {
    const now_ms = performance.now();
    const [cx, cy] = walk.step(((now_ms - moved_ms) / 1000) * (field("rides").checked ? TRAM_M_PER_S : WALK_M_PER_S));
    moved_ms = now_ms;
    for (const shape of [me, range]) {
        shape.setAttribute("cx", cx);
        shape.setAttribute("cy", cy);
    }
    if (walk.isThere) goal.setAttribute("visibility", "hidden");
}, FRAME_MS);

// The broker.

function log(text, className = "") {
    const line = document.createElement("li");
    line.textContent = `${new Date().toLocaleTimeString()}  ${text}`;
    line.className = className;
    field("log").prepend(line);
    if (field("log").children.length > LINES_MAX) field("log").lastChild.remove();
}

function count(id) {
    field(id).textContent = Number(field(id).textContent) + 1;
}

async function getToken() {
    account = await login(account.token);
    sessionStorage.setItem("token", account.token);
    return account.token;
}

const client = new Dynamoth(world.brokers.toSorted(() => Math.random() - 0.5), { getToken });
client.addEventListener("state", ({ detail }) => {
    field("state").textContent = detail.state;
    field("state").dataset.state = detail.state;
    field("broker").textContent = detail.broker ?? "none";
});
client.addEventListener("moved", ({ detail }) => {
    count("moves");
    log(`moved from ${detail.from} to ${detail.to}`, "note");
});
client.addEventListener("error", ({ detail }) => log(`${detail.code}: ${detail.message}`, "fault"));

let is_sending = false;
setInterval(async () => {
    if (is_sending) return; // without a broker the latest place waits, and no older ones
    is_sending = true;
    const { lat, lon } = box.place(walk.at);
    const record = { user: account.user, lat, lon, at: Date.now() / 1000 };
    try {
        await client.publish("d:user_locations", JSON.stringify(record));
        count("sent");
    } catch (error) {
        log(`the place was not stored: ${error.message}`, "fault");
    }
    is_sending = false;
}, LOCATION_MS);

// Subscriptions.

function summary(query, rows) {
    if (query === "report_counts") return rows.map((row) => `${row.reports} × ${words(row.type)}`).join(", ");
    if (query === "shelters_near_me") return `go to ${rows.map((row) => row.name).join(", ")}`;
    const most = rows.reduce((a, b) => (b.severity > a.severity ? b : a));
    const people = most.people === undefined ? "" : `, ${most.people} people near it`;
    const text = most.text ? `: ${most.text.split(";")[0]}` : "";
    return `${rows.length} report${rows.length > 1 ? "s" : ""}; ${words(most.type ?? "the gravest")} of severity ${most.severity}${people}${text}`;
}

function show(query, publication) {
    count("results");
    const result = JSON.parse(publication.data);
    if (result.dropped) return log(`${words(query)}: there is no such query any more`, "note");
    if (result.error) return log(`${words(query)}: ${result.error}`, "fault");
    for (const row of result.rows) {
        if (query === "shelters_near_me") shelters.get(row.id)?.classList.add("named");
        else if (row.lat !== undefined) showReport(row);
    }
    log(`${words(query)}: ${summary(query, result.rows)}`);
}

function subscribe(query, params) {
    const line = document.createElement("li");
    line.textContent = `${words(query)} ${Object.entries(params).filter(([name]) => name !== "user").map(([, value]) => value).join(", ")}`;
    try {
        const subscription = client.subscribe({ query, params }, (publication) => show(query, publication), {
            onGap: (gap) => {
                count("gaps");
                log(`${words(query)}: results are missing: ${gap.reason}`, "fault");
            },
            onError: (error) => {
                log(`${words(query)}: ${error.message}`, "fault");
                if (error.retry === "never") line.remove();
            },
        });
        const button = document.createElement("button");
        button.textContent = "end";
        button.addEventListener("click", () => {
            subscription.unsubscribe();
            line.remove();
        });
        line.append(button);
        field("subscriptions").append(line);
    } catch (error) {
        log(error.message, "fault");
    }
}

for (const [name, { title }] of Object.entries(QUERIES)) field("query").add(new Option(title, name));
for (const type of world.types) field("type").add(new Option(words(type), type));
for (const number of world.squares.keys()) field("square").add(new Option(`square ${number + 1}`, number));

function showNeeded() {
    for (const id of ["type", "square", "radius"]) field(id).hidden = !QUERIES[field("query").value].needs.includes(id);
}
field("query").addEventListener("change", showNeeded);
showNeeded();

function chosen(query) {
    const { needs } = QUERIES[query];
    const [lat, lon] = world.squares[field("square").value];
    return {
        ...(query.endsWith("_me") ? { user: account.user } : {}),
        ...(needs.includes("type") ? { type: field("type").value } : {}),
        ...(needs.includes("square") ? { lat, lon } : {}),
        ...(needs.includes("radius") ? { radius_m: Number(field("radius").value) } : {}),
    };
}

field("subscribe").addEventListener("submit", (event) => {
    event.preventDefault();
    const query = field("query").value;
    const params = chosen(query);
    if (query.endsWith("_me")) range.setAttribute("r", params.radius_m);
    subscribe(query, params);
});

subscribe("reports_near_me", { user: account.user, radius_m: 1000 });
range.setAttribute("r", 1000);
