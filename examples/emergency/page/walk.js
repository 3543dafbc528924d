// The town in the plane, and walking along its streets. Nothing of a browser is needed here.

const EARTH_RADIUS_M = 6371008.8;
const MARGIN_M = 120;

/** The plane of the map, in metres: x to the east, y to the south, as in SVG. */
export function bounds(places) {
    const perDegree = (Math.PI / 180) * EARTH_RADIUS_M;
    const [north, west] = [Math.max(...places.map((each) => each[0])), Math.min(...places.map((each) => each[1]))];
    const squeeze = Math.cos((north * Math.PI) / 180);
    const point = (lat, lon) => [
        (lon - west) * perDegree * squeeze + MARGIN_M,
        (north - lat) * perDegree + MARGIN_M,
    ];
    const round = (degrees) => Math.round(degrees * 1e6) / 1e6;
    const place = ([x, y]) => ({
        lat: round(north - (y - MARGIN_M) / perDegree),
        lon: round(west + (x - MARGIN_M) / (perDegree * squeeze)),
    });
    const points = places.map(([lat, lon]) => point(lat, lon));
    return {
        width: Math.max(...points.map(([x]) => x)) + MARGIN_M,
        height: Math.max(...points.map(([, y]) => y)) + MARGIN_M,
        point,
        place,
    };
}

const distance = ([ax, ay], [bx, by]) => Math.hypot(ax - bx, ay - by);

/** The number of the point that is nearest to another one. */
export function nearest(points, target) {
    let best = 0;
    for (const number of points.keys()) {
        if (distance(points[number], target) < distance(points[best], target)) best = number;
    }
    return best;
}

/** The points of a shortest way, both ends included (Dijkstra; a town is small). */
export function way(points, neighbours, start, end) {
    const lengths = new Map([[start, 0]]);
    const before = new Map();
    const open = new Set([start]);
    while (open.size > 0) {
        let here = null;
        for (const each of open) if (here === null || lengths.get(each) < lengths.get(here)) here = each;
        open.delete(here);
        if (here === end) break;
        for (const there of neighbours[here]) {
            const length = lengths.get(here) + distance(points[here], points[there]);
            if (length < (lengths.get(there) ?? Infinity)) {
                lengths.set(there, length);
                before.set(there, here);
                open.add(there);
            }
        }
    }
    const way = [end];
    while (way[0] !== start) way.unshift(before.get(way[0]));
    return way;
}

/** Somebody who stands at a point, and walks along points. */
export function stepper(points, start) {
    let at = points[start];
    let left = [start];
    return {
        get at() {
            return at;
        },
        get isThere() {
            return left.length === 1 && at === points[left[0]];
        },
        /** The point that is walked to at present: a new way begins there. */
        get next() {
            return left[0];
        },
        follow(way) {
            left = way;
        },
        step(metres) {
            while (metres > 0) {
                const target = points[left[0]];
                const length = distance(at, target);
                if (length > metres) {
                    at = at.map((value, axis) => value + ((target[axis] - value) * metres) / length);
                    break;
                }
                at = target;
                metres -= length;
                if (left.length === 1) break;
                left = left.slice(1);
            }
            return at;
        },
    };
}
