#!/usr/bin/env bash
# Serve a model on several hosts through ssh: one `plait launch` a host, each with its own key.
# Ctrl-C drains all; a second one stops at once. If this script or a connection ends, nothing is left running.
set -euo pipefail

usage() {
    cat <<'END'
usage: launch-multinode.sh [OPTION]... HOST... -- [MODEL] [FLAG]...

  HOST               where to run, as ssh takes it; the first one is the head
  --head ADDRESS     HOST:PORT of the head for the other nodes (default: the first HOST)
  --keys DIR         folder of `plait keys new DIR --nodes N` here; made if it is not there (default: plait-keys)
  --remote-keys DIR  where each host keeps its copy (default: .plait-keys, in the home folder)
  --plait PROGRAM    where plait is, here and on each host (default: plait, in the PATH)

MODEL and FLAGS go to `plait launch` on each host. The exit code is the head's, or that of a host that ended alone.
END
}

fail() {
    echo "launch-multinode.sh: $1" >&2
    exit 2
}

head="" keys=plait-keys remote_keys=.plait-keys plait=plait hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
        --head | --keys | --remote-keys | --plait)
            [ $# -gt 1 ] || fail "$1 needs a value"
            name=${1#--}
            printf -v "${name//-/_}" %s "$2"
            shift
            ;;
        -h | --help) usage && exit 0 ;;
        -*) fail "unknown option $1; see --help" ;;
        *) hosts+=("$1") ;;
    esac
    shift
done
[ $# -gt 0 ] || fail "no --; write HOST... -- MODEL, see --help"
shift
[ ${#hosts[@]} -gt 0 ] || fail "no hosts were given; see --help"
head=${head:-${hosts[0]#*@}}

# A broken connection is noticed after 15 s.
connect() {
    ssh -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "$@"
}

[ -e "$keys/public.keys" ] || "$plait" keys new "$keys" --nodes "${#hosts[@]}"
[ "$(grep -c . "$keys/public.keys")" -eq ${#hosts[@]} ] ||
    fail "$keys has keys of another number of nodes than the ${#hosts[@]} hosts; name a new folder with --keys"
for node in "${!hosts[@]}"; do
    for file in public.keys "node-$node.key"; do
        printf -v command 'umask 077 && mkdir -p %q && cat > %q' "$remote_keys" "$remote_keys/$file"
        connect "${hosts[$node]}" "$command" < "$keys/$file"
    done
done

# Each host's standard input stays open as long as this script lives. A line drains, its end stops at once, and so does
# silence once it has got signs of life: the host's own end of a cut connection stays open.
folder=$(mktemp -d)
nodes=() inputs=() signs=""
finish() {
    [ -z "$signs" ] || exec {signs}>&-
    signs=""
    for input in "${inputs[@]}"; do exec {input}>&-; done
    inputs=()
}
drain() {
    trap finish INT TERM
    for input in "${inputs[@]}"; do echo drain >&"$input" || true; done
}
trap drain INT TERM
trap 'finish; rm -rf "$folder"' EXIT

for node in "${!hosts[@]}"; do
    printf -v command '%q ' "$plait" launch "$@" --nnodes "${#hosts[@]}" --node-rank "$node" --head "$head" \
        --keys "$remote_keys" --launcher none --stop-with-stdin
    mkfifo "$folder/$node"
    exec {input}<> "$folder/$node"
    # Only this script holds the end that is written to.
    (
        for other in "${inputs[@]}"; do exec {other}>&-; done
        exec {input}>&-
        connect "${hosts[$node]}" "exec $command"
    ) < "$folder/$node" &
    nodes+=($!)
    inputs+=("$input")
done

# It ends with this script, or once the script closes `signs`: nothing else holds that.
mkfifo "$folder/signs"
(
    trap '' INT TERM
    trap - EXIT
    while read -rt 3 _ || [ $? -gt 128 ]; do
        for input in "${inputs[@]}"; do printf . >&"$input"; done
    done
) < "$folder/signs" &
exec {signs}> "$folder/signs"

# Nodes end together, within 10 s, and say why. A host that ends alone, as one without plait or whose machine is gone,
# is waited for by the others; nobody starts it again.
is_running() { kill -0 "${nodes[$1]}" 2> /dev/null; }
alone="" since=0 failed=""
while [ ${#inputs[@]} -gt 0 ]; do
    running=0
    for node in "${!hosts[@]}"; do
        if is_running "$node"; then
            running=$((running + 1))
        elif [ -z "$alone" ]; then
            alone=$node since=$SECONDS
        fi
    done
    [ "$running" -gt 0 ] || break
    if [ -n "$alone" ] && [ $((SECONDS - since)) -ge 15 ]; then
        echo "launch-multinode.sh: ${hosts[$alone]} has ended alone; its lines are above. The others stop" >&2
        failed=$alone
        finish
    fi
    sleep 0.5 || true
done

codes=()
for node in "${!hosts[@]}"; do
    ended=0
    # A signal interrupts `wait`; its trap has run then.
    until wait "${nodes[$node]}" && ended=0 || { ended=$?; ! is_running "$node"; }; do :; done
    codes+=("$ended")
done
[ -z "$failed" ] || [ "${codes[0]}" -gt 0 ] || exit "${codes[$failed]}"
exit "${codes[0]}"
