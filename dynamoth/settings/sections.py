"""The settings of every process: name, default, unit and meaning, each declared once.

Theory of operation
-------------------
A section is a frozen dataclass, and each of its fields is declared with :func:`setting`. Everything else is derived
from these declarations: the keys of the TOML file (``[agent] http_port``), the environment variables
(``DYNAMOTH_AGENT_HTTP_PORT``), the flags of the command line, their ``--help``, the checks and their messages,
``--print-config`` (``load.py``), and the options of the machines and processes, which inherit these classes.

``ClusterSettings`` is what the whole cluster must agree on: give every process the same. All other sections are what
one process may choose for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamoth.protocol.reports import REPORT_CHANNELS_MAX
from dynamoth.settings.declare import setting
from dynamoth.settings.link_defaults import CONNECT_TIMEOUT_S, PING_INTERVAL_S, PING_TIMEOUT_S

GIGABIT_BYTES_PER_S = 125_000_000

OUTGOING_BYTES_PER_S_MAX = 10**12
"""More than any network card sends: 8 terabits per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One Redis server, an item of ``[[cluster.servers]]``."""

    id: str
    """Its name in plans, logs and metrics; never given to another server."""
    url: str
    """Where agents, balancer and clients reach it. Without credentials: the plan shows it to every client."""
    outgoing_bytes_per_s_max: int
    """The traffic that counts as load ratio 1. Left out: ``cluster.outgoing_bytes_per_s_max``."""
    draining: bool = False
    """Whether a new cluster begins with this server being drained: it gets no channels. Only the balancer reads this,
    and only until the first command (`server`, `pause`, `pin`): later the stored plan says which are drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibilitySettings:
    """One rule about channels that plain Redis clients use, too: an item of ``[[cluster.compatibility]]``."""

    pattern: str
    """Which channels, as for PSUBSCRIBE."""
    server: str
    """The id of the server where these clients are."""
    plain: bool = True
    """Whether messages carry no envelopes, so that plain clients can read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings that the whole cluster must agree on."""

    servers: tuple[ServerSettings, ...] = setting((), "the Redis servers")
    compatibility: tuple[CompatibilitySettings, ...] = setting(
        (),
        "the first rules of a new cluster for channels shared with plain Redis clients; later they are changed by"
        " 'dynamoth plan compatibility'",
    )
    outgoing_bytes_per_s_max: int = setting(
        GIGABIT_BYTES_PER_S,
        "what a server can send, where a server has no value of its own; load ratios are relative to it",
        unit="bytes/s",
        minimum=1,
        maximum=OUTGOING_BYTES_PER_S_MAX,
    )
    trusted_hosts: str = setting(
        "",
        "hosts that get our credentials besides those of the servers: names, suffixes (*.redis.example.com), networks"
        " (10.1.0.0/16), separated by spaces; for servers that are still to be added",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How this process connects to the Redis servers."""

    username: str = setting("", "Redis user; empty for the default user")
    password: str = setting("", "its password; empty for none", secret=True)
    password_file: str = setting("", "a file whose first line is the password, instead of password; empty for none")
    tls_ca_file: str = setting("", "CA certificates (PEM) for rediss:// servers; empty for those of the system")
    tls_cert_file: str = setting("", "client certificate (PEM), for servers with tls-auth-clients; empty for none")
    tls_key_file: str = setting("", "the key of that certificate (PEM)")
    tls_verify: bool = setting(True, "whether certificates are checked; off for tests only")
    connect_timeout_s: float = setting(CONNECT_TIMEOUT_S, "longest time for one attempt to connect", unit="s", above=0)
    ping_interval_s: float = setting(
        PING_INTERVAL_S, "a PING is sent after this much silence; 0 for never", unit="s", minimum=0
    )
    ping_timeout_s: float = setting(PING_TIMEOUT_S, "the link is down after this much more silence", unit="s", above=0)


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """The HTTP of a daemon."""

    http_host: str = setting("127.0.0.1", "where /healthz, /readyz and /metrics listen")
    http_port: int = setting(0, "their port; 0 for no HTTP", minimum=0, maximum=65535)


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """The reports of an agent: settings that it shares with its load analyzer."""

    report_interval_s: float = setting(
        1.0,
        "time between two reports to the balancer; below its agent_stale_s, or it takes the agent for dead",
        unit="s",
        minimum=0.1,
        maximum=60,
    )
    channels_per_report_max: int = setting(
        1000,
        "how many of the busiest channels a report names; the others are in its sums",
        minimum=1,
        maximum=REPORT_CHANNELS_MAX,
    )


@dataclass(frozen=True, kw_only=True)
class AgentSettings(ReportSettings, HttpSettings):
    """Settings of an agent."""

    server: str = setting(
        "", "id of the server that this agent sits beside: one of the configuration, or of the stored plan"
    )
    standby: str = setting(
        "", "instead of server: URL of a standby server (fleet.pool), which has an id while the plan lists it"
    )


@dataclass(frozen=True, kw_only=True)
class PlanningSettings:
    """Settings of the balancer's machine: thresholds and times of its decisions.

    A load ratio is load over capacity (Dynamoth, eq. 1): of outgoing bytes or of CPU, whichever is tighter.
    ``load_ratio_high``, ``load_ratio_safe`` and ``wait_s`` have
    the values of that paper's own code. The paper does not give the thresholds of its Algorithm 1.
    """

    load_ratio_high: float = setting(0.8, "a server above this load ratio is relieved (LR_high)", above=0)
    load_ratio_safe: float = setting(
        0.6, "servers are relieved down to this load ratio, and no move fills one above it (LR_safe)", above=0
    )
    wait_s: float = setting(20.0, "the balancer waits this long between two plans of its own", unit="s", minimum=0)
    averaging_s: float = setting(10.0, "loads are averaged over this time", unit="s", above=0)
    cpu_ratio_max: float = setting(
        1.0,
        "the CPU of a Redis process that counts as load ratio 1, in cores: it executes commands in one thread; 0: CPU"
        " does not count",
        minimum=0,
    )
    memory_bytes_max: int = setting(
        0, "what counts as all memory of a server without maxmemory; 0: none", unit="bytes", minimum=0
    )
    full_ratio: float = setting(
        0.9, "a server that uses more of its connections (maxclients) or its memory than this gets no channels", above=0
    )
    channel_rest_s: float = setting(
        30.0, "the balancer does not move a channel again for this time after a move", unit="s", minimum=0
    )
    moves_per_plan_max: int = setting(500, "most channels that one plan moves", minimum=1)
    moves_per_server_max: int = setting(
        100, "most channels that one plan moves away from, or to, one server", minimum=1
    )
    transitions_max: int = setting(
        5000, "most channels in transition at once, including those that administrators moved", minimum=1
    )
    server_dead_s: float = setting(
        3.0,
        "a server that is silent for this time counts as dead, and others get its channels and slots; more than"
        " commands there may take",
        unit="s",
        above=0,
    )
    agent_stale_s: float = setting(5.0, "an agent that is silent for this time counts as down", unit="s", above=0)
    lease_s: float = setting(
        2.5, "another balancer can take over when one has not renewed its lease for this time", unit="s", above=0
    )
    standby: bool = setting(
        True, "wait while another balancer is at work, and replace it when it ends; off: end with exit code 2"
    )
    all_subscribers_ratio_min: float = setting(
        100.0,
        "a channel with more publications/s per subscriber is replicated so that all subscribers listen at all its"
        " servers: few subscribers with many messages each",
        above=0,
    )
    """AllSubs_threshold: one replica for each time that it is reached.

    Each subscriber then has a connection to each replica, which is little beside 100 publications/s.
    """
    all_publishers_ratio_min: float = setting(
        10.0,
        "a channel with more subscribers per publication/s is replicated so that publications go to all its servers:"
        " one more copy per publication is cheap beside its many deliveries",
        above=0,
    )
    """AllPubs_threshold: one replica for each time that it is reached."""
    replicate_publications_per_s_min: float = setting(
        1000.0, "a channel is replicated for its publications only above this rate", unit="1/s", minimum=0
    )
    """Publication_threshold. Below it, Redis' one sending thread has more than a millisecond for each message."""
    replicate_subscribers_min: int = setting(
        100, "a channel is replicated for its subscribers only above this number: one server serves fewer", minimum=0
    )
    """Subscriber_threshold. In Dynamoth's Experiment 1 one server and three were equally quick up to this number."""
    replicate_load_ratio_min: float = setting(
        0.5,
        "a channel is replicated only when it alone makes more than this load ratio: with less, a server has room for"
        " others. One that makes more than load_ratio_high is replicated whatever its publications and subscribers",
        minimum=0,
    )
    """At one server of the largest capacity. No replica is added that would carry less than half of it. Less than
    ``load_ratio_safe``, so that a channel is replicated before it fills its server."""
    replicate_keep_ratio: float = setting(
        0.6,
        "a replicated channel loses servers below this share of the load that replicated it, so that it does not go to"
        " and fro",
        above=0,
        maximum=1,
    )
    """With 0.6, figures may vary by a fourth around their mean without any change."""
    replicas_max: int = setting(
        16,
        "most servers of a channel that the balancer replicates, as clients connect to each; 1: it changes none",
        minimum=1,
    )
    replication_rest_s: float = setting(
        30.0, "least time between two changes of the replication of a channel", unit="s", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class BalancerSettings(PlanningSettings, HttpSettings):
    """Settings of the balancer."""


@dataclass(frozen=True, kw_only=True)
class ScalingSettings:
    """When servers are added and freed by load; the balancer's fleet has these as its options.

    Loads are parts of the capacity of all servers that take part. ``grow_ratio`` and ``release_ratio`` leave a gap, so
    that a fleet that has just shrunk does not grow again at once.
    """

    servers_min: int = setting(1, "the fleet has at least this many servers that take part", minimum=1)
    servers_max: int = setting(8, "the fleet has at most this many servers, with those that are starting", minimum=1)
    grow_ratio: float = setting(
        0.6, "servers are added while the load ratio of all servers together is above this", above=0
    )
    grow_delay_s: float = setting(3.0, "the load is above grow_ratio for this time first", unit="s", minimum=0)
    release_ratio: float = setting(
        0.45, "a server is released if the others, without it, have at most this load ratio together", above=0
    )
    release_delay_s: float = setting(60.0, "the load is so low for this time first", unit="s", minimum=0)
    answer_timeout_s: float = setting(120.0, "a provisioner has this time to answer", unit="s", above=0)
    join_timeout_s: float = setting(
        60.0, "a server that was started reports its load within this time, or is given up", unit="s", above=0
    )
    retry_s: float = setting(
        2.0, "time before a failed request is repeated; each failure doubles it", unit="s", above=0
    )
    retry_s_max: float = setting(120.0, "longest such time", unit="s", above=0)


@dataclass(frozen=True, kw_only=True)
class FleetSettings(ScalingSettings):
    """Where servers come from, and when they come and go."""

    provisioner: str = setting(
        "none",
        "where servers come from: a pool of standby servers, processes on the balancer's machine, or a command",
        choices=("none", "pool", "process", "command"),
    )
    pool: str = setting("", "the URLs of the standby servers of the provisioner pool, separated by spaces")
    command: str = setting("", "the program of the provisioner command, with its arguments as a shell has them")
    folder: str = setting("", "where the provisioner process keeps its servers; a folder that outlives the balancer")


@dataclass(frozen=True, kw_only=True)
class RecorderSettings(HttpSettings):
    """Settings of a recorder."""

    out: str = setting("", "the folder of the recording; made if it is not there, added to if it is")
    keep_hours: float = setting(
        720.0, "what is older is deleted; 0 for no limit", unit="h", minimum=0, maximum=1_000_000
    )
    keep_bytes_max: int = setting(
        10_000_000_000,
        "while the recording is larger, its oldest hour is deleted, but never the present one; 0 for no limit",
        unit="bytes",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """Settings of a broker's machine: what users may do, and how long things are kept."""

    sessions_max: int = setting(50_000, "users are sent elsewhere when this many are connected", minimum=1)
    subscriptions_per_session_max: int = setting(
        128, "subscriptions of one user's connection at most", minimum=1, maximum=1000
    )
    new_interests_per_hour_max: int = setting(
        1000,
        "new interests of the data cluster's queries per user and hour that this broker registers: each is executed"
        " for the keep_s of its query, whoever unsubscribes; 0: no bound",
        minimum=0,
    )
    slow_sessions_max: int = setting(
        500,
        "so many users at most may be behind at once; beyond that, the connection of the one who has been for longest"
        " is closed: bounds memory, with unsent_bytes_max",
        minimum=1,
    )
    linger_s: float = setting(
        10.0,
        "what nobody is subscribed to any more is kept for this time, so that users who come and go cost Redis nothing",
        unit="s",
        minimum=0,
    )
    tip_check_s: float = setting(
        5.0,
        "the ends of all logs are read this often, for publications whose publisher died between append and publish",
        unit="s",
        above=0,
    )
    position_ttl_s: float = setting(
        2_592_000.0,
        "a stored position of a user whom no broker has served for this time is forgotten: longer than users stay away",
        unit="s",
        minimum=60,
        maximum=31_536_000,
    )
    ping_s: float = setting(25.0, "time between two pings to a user", unit="s", above=0)
    report_s: float = setting(1.0, "time between two reports to the coordinator", unit="s", minimum=0.1, maximum=60)
    capacity_bytes_per_s: int = setting(
        GIGABIT_BYTES_PER_S,
        "traffic of this broker that counts as load ratio 1: what comes from Redis and what goes to users",
        unit="bytes/s",
        minimum=1,
        maximum=OUTGOING_BYTES_PER_S_MAX,
    )
    ratio_accept: float = setting(
        1.0,
        "with more traffic than this part of capacity_bytes_per_s, newcomers are sent elsewhere; users whom a"
        " coordinator has had moved here are taken",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class BrokerSettings(SessionSettings, HttpSettings):
    """Settings of an edge broker."""

    id: str = setting("", "the name of this broker, different for each")
    host: str = setting("127.0.0.1", "where users connect by WebSocket and by server-sent events")
    port: int = setting(8000, "port for WebSockets; 0 for any that is free", minimum=0, maximum=65535)
    sse_port: int = setting(0, "port for server-sent events and POST; 0 for none", minimum=0, maximum=65535)
    tls_cert_file: str = setting("", "certificate (PEM) for users' connections; empty for no TLS")
    tls_key_file: str = setting("", "the key of that certificate (PEM)")
    url: str = setting(
        "",
        "the URL at which users reach this broker (wss://HOST/connect); empty: made of host and port where these are"
        " definite, else the coordinator sends nobody here",
    )
    location: str = setting(
        "",
        "where this broker is: LATITUDE,LONGITUDE in degrees, for newcomers who ask for a near broker; empty: unknown",
    )
    alternates: str = setting(
        "",
        "the URLs at which users reach the other brokers (wss://HOST/connect), separated by spaces; a coordinator knows"
        " better ones while it runs",
    )
    origins: str = setting(
        "", "the origins of pages that may connect (https://example.org), separated by spaces; others are refused"
    )
    token_keys_file: str = setting(
        "", "a file with the keys of tokens: a JSON Web Key Set, in which every key has its alg and kid"
    )
    audience: str = setting(
        "",
        "this broker's name in the claim aud of tokens: one that does not name it is refused; empty: every token with"
        " an aud is refused",
    )
    anonymous: bool = setting(False, "whether users without a token may subscribe to everything, but publish nothing")
    logs: str = setting("", "the log servers, as ID=URL separated by spaces; always the same list")
    data_cluster: bool = setting(
        False,
        "whether standing queries and datasets are those of the data cluster, which log servers have the catalog of",
    )
    history: str = setting("", "patterns of the channels whose publications are logged, separated by spaces")
    conflate: str = setting(
        "",
        "patterns of the other channels of which only the latest publication counts, separated by spaces: a user who"
        " falls behind gets that one in place of a gap",
    )
    presence: str = setting("", "patterns of the channels on which users see who else is present, separated by spaces")
    presence_ttl_s: float = setting(
        30.0,
        "users whose broker has died leave after this time, unless another one serves them then",
        unit="s",
        minimum=3,
        maximum=3600,
    )
    presence_grace_s: float = setting(
        10.0,
        "a user whose connection was lost leaves after this time, unless a broker serves it again",
        unit="s",
        minimum=1,
        maximum=3600,
    )
    retained_min: int = setting(10_000, "a log keeps at least this many publications", minimum=1)
    log_ttl_s: float = setting(
        604_800.0, "a log that nobody has used for this time is forgotten", unit="s", minimum=1, maximum=31_536_000
    )
    log_durable: bool = setting(
        False, "whether log servers lose nothing when they restart (appendfsync always); only then is that no gap"
    )
    unsent_bytes_max: int = setting(
        1_048_576, "with more bytes that wait for one user, that user falls behind", unit="bytes", minimum=65_536
    )
    accepts_per_s_max: float = setting(
        1000.0, "connections that are accepted per second; others wait", unit="1/s", above=0
    )
    evict_per_s_max: float = setting(500.0, "users asked to move per second by a broker that ends", unit="1/s", above=0)
    drain_s: float = setting(
        30.0,
        "at SIGTERM, users are moved to alternates for this time at most, before the others are closed",
        unit="s",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class MigrationSettings:
    """When users are moved between brokers, and how many. Letters are those of BAD, Algorithm 1.

    A load ratio is load over capacity, of traffic or of the tightest other resource of a broker.
    """

    dry_run: bool = setting(False, "decide and record, but move nobody")

    # When something is due.

    cov_max: float = setting(
        0.15, "alpha: relief is due above this cov of the load ratios; 0: at any unevenness", minimum=0
    )
    cov_target: float = setting(
        0.05, "relief goes on until the cov is at most this; at most cov_max; 0: until no move helps", minimum=0
    )
    ratio_mean_min: float = setting(0.3, "beta: and above this mean load ratio; 0: at any load", minimum=0)
    ratio_high: float = setting(
        0.9, "relief is also due while a broker is above this load ratio, whatever the cov; 0: always", minimum=0
    )
    shuffle_cov_min: float = setting(
        0.5, "gamma: a shuffle is due above this cov of the load ratios; more than cov_max", above=0
    )
    shuffle_ratio_mean_min: float = setting(
        0.3, "theta: and above this mean load ratio; at least ratio_mean_min", minimum=0
    )
    looks: int = setting(
        3, "relief or a shuffle begins when it was due at this many looks one after the other", minimum=1
    )

    # Times.

    report_s: float = setting(
        1.0,
        "T_report: the coordinator says this often where users can go; brokers report at their own broker.report_s",
        unit="s",
        above=0,
        maximum=5,
    )
    suspect_reports: int = setting(
        3, "a broker is suspect while its latest report is older than this many times its broker.report_s", minimum=1
    )
    decide_s: float = setting(5.0, "T_decide: time between two looks", unit="s", above=0)
    wait_s: float = setting(
        20.0, "T_wait: time without decisions after a plan has settled; 0: until all have reported", unit="s", minimum=0
    )
    rest_s: float = setting(120.0, "a user who has moved stays for this time; 0: no rest", unit="s", minimum=0)
    ask_timeout_s: float = setting(2.0, "brokers have this time to answer with candidates", unit="s", above=0)
    batch_timeout_s: float = setting(
        60.0, "users of a batch who have not moved after this time count as failed", unit="s", above=0
    )
    fast_half_life_s: float = setting(
        10.0, "half-life of the average load that, where it is the larger, placement goes by", unit="s", above=0
    )
    slow_half_life_s: float = setting(60.0, "half-life of the average load that moves go by", unit="s", above=0)

    appear_s: float = setting(
        30.0,
        "a placed user counts as a mean user for this time, in which it connects, subscribes and shows in the averages;"
        " 0: until the next report",
        unit="s",
        minimum=0,
    )

    # Loads.

    connection_bytes_per_s: float = setting(
        64.0,
        "a user counts as this load besides its interests; 0: users without interests are free",
        unit="bytes/s",
        minimum=0,
    )
    ratio_accept: float = setting(
        0.85,
        "no move of a shuffle takes a broker above this load ratio, and relief of overloaded ones ends here",
        above=0,
    )
    margin_ratio: float = setting(
        0.001,
        "a move leaves its target this part below the load ratio that its source had; 0: anything below",
        minimum=0,
        maximum=1,
    )

    # Bounds.

    candidates_max: int = setting(10_000, "most users that one decision looks at", minimum=1)
    moves_per_plan_max: int = setting(500, "most moves of one plan of relief, and of one batch of a shuffle", minimum=1)
    moves_in_max: int = setting(200, "most of these into one broker", minimum=1)
    shuffle_moves_max: int = setting(20_000, "most moves of one shuffle", minimum=1)

    # What a shuffle must bring.

    gain_ratio_min: float = setting(
        0.1, "least gain of a shuffle, as a part of the largest load ratio; 0: any gain", minimum=0
    )
    egress_weight: float = setting(
        0.5, "a part of the Redis egress counts as this part of the largest load ratio; 0: it does not count", minimum=0
    )
    move_cost_ratio: float = setting(
        0.2, "to move every user costs this part of the largest load ratio; 0: moves are free", minimum=0
    )
    slack_ratio: float = setting(
        0.05, "a shuffle groups users within this part above the least load ratio; 0: not", minimum=0
    )
    stay_ratio: float = setting(
        0.05, "in a shuffle, a user stays unless that costs this part of the user's load; 0: moves are free", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(MigrationSettings, HttpSettings):
    """Settings of a coordinator of edge brokers."""

    scheme: str = setting(
        "similarity",
        "where relief tries to move a user first: to the broker that has most of the user's interests, or to the least"
        " loaded one",
        choices=("similarity", "load"),
    )
    lease_s: float = setting(
        2.5,
        "another coordinator can take over when one has not renewed its lease for this time",
        unit="s",
        minimum=1.5,
    )
    forget_s: float = setting(
        30.0,
        "a broker that has not reported for this time is gone, or for twice the time after which it is suspect",
        unit="s",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class DataClusterSettings(HttpSettings):
    """Settings of a data cluster."""

    logs: str = setting("", "the log servers, as ID=URL separated by spaces; the same list as broker.logs")
    folder: str = setting("data-cluster", "where the archive, snapshots and checkpoints are kept")
    master: str = setting("", "the Spark master; empty: local[*]")
    archive_s: float = setting(30.0, "records are copied to the archive this often", unit="s", minimum=1)
    hot_records: int = setting(
        100_000, "records of each partition that stay at Redis when they are archived", minimum=100
    )
    archive_keep_days: int = setting(
        0, "older days of the archive are deleted when no query needs them any more; 0: all are kept", minimum=0
    )
    log_ttl_s: float = setting(604_800.0, "as broker.log_ttl_s", unit="s", minimum=1, maximum=31_536_000)
    log_durable: bool = setting(False, "as broker.log_durable")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Settings of the log on stderr."""

    level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))
    format: str = setting("json", "one JSON object per line, or text for people", choices=("json", "text"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a process; :func:`~dynamoth.settings.load.load_config` makes it."""

    cluster: ClusterSettings = ClusterSettings()
    link: LinkSettings = LinkSettings()
    agent: AgentSettings = AgentSettings()
    balancer: BalancerSettings = BalancerSettings()
    fleet: FleetSettings = FleetSettings()
    recorder: RecorderSettings = RecorderSettings()
    broker: BrokerSettings = BrokerSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    data_cluster: DataClusterSettings = DataClusterSettings()
    log: LogSettings = LogSettings()
