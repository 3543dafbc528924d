# Runs the code blocks of one page as a reader would, in the folder where it is started.
#
# usage: run_page.sh PYTHON SHELL_PROGRAM PYTHON_PROGRAM
#
# The daemons (dynamoth up, agent, balancer, broker, record, data-cluster) run beside all that follows. What comes next waits until they are ready.
# The first command that fails ends it, and so does a daemon that has ended.

set -Eeuo pipefail
shopt -s nullglob

python=$1
daemons=()
ready=yes

trap 'echo "ended with $?: $BASH_COMMAND"' ERR
trap 'stop_daemons $?' EXIT

stop_daemons() {
    local daemon
    for daemon in "${daemons[@]}"; do
        kill "$daemon" || true
    done
    wait
    [ "$1" = 0 ] || tail -n 15 -- *.log < /dev/null
}

# A program of the page does what a reader's does, and nothing that warns.
python() {
    wait_ready
    "$python" -W error "$@"
}

dynamoth() {
    case "${1-} ${2-}" in
        up* | agent* | balancer* | record* | data-cluster* | "broker --"*)
            log=$1.${#daemons[@]}.log
            : > "$log"    # wait_ready looks for it at once
            "$python" -P -m dynamoth_cli "$@" > "$log" 2>&1 < /dev/null &
            daemons+=($!)
            ready=no
            ;;
        *)
            wait_ready
            "$python" -P -m dynamoth_cli "$@"
            ;;
    esac
}

# "dynamoth up" says that it is ready; what a configuration file describes is when "dynamoth status" has no problem.
is_ready() {
    local file
    for file in up.*.log; do
        grep --quiet ready "$file" || return 1
    done
    for file in $(grep --files-with-matches cluster.servers /dev/null *.toml || true); do
        "$python" -P -m dynamoth_cli status --config "$file" > status.log 2>&1 || return 1
    done
}

check_daemons() {
    local daemon
    for daemon in "${daemons[@]}"; do
        kill -0 "$daemon"
    done
}

wait_ready() {
    until [ $ready = yes ] || is_ready; do
        check_daemons
        sleep 0.05
    done
    ready=yes
}

. "./$2"
wait_ready
"$python" -W error "$3"
check_daemons
