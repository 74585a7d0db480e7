#!/bin/bash
# Run a command on two "machines": network namespaces of this one, with a cable between them.
#
#   two_nodes.sh COMMAND [ARGUMENT...]
#
# The command runs once on each, with NODE (0 or 1), ADDRESS (its own), MASTER_ADDR and MASTER_PORT (of node 0) and
# GLOO_SOCKET_IFNAME. Ends with the larger exit code of the two, and with 77 where namespaces are not permitted.
set -u
id=$$
node=(ragen$id-0 ragen$id-1)
address=(10.77.0.1 10.77.0.2)
cable=(rv$id-0 rv$id-1)

clean_up() {
  for name in "${node[@]}"; do
    ip netns pids "$name" 2>/dev/null | xargs -r kill -KILL
    ip netns delete "$name" 2>/dev/null
  done
}

not_permitted() {
  echo "two_nodes.sh: network namespaces are not permitted here (needs ip, and root or CAP_NET_ADMIN); skipped" >&2
  exit 77
}

command -v ip >/dev/null || not_permitted
trap clean_up EXIT
trap 'exit 130' INT TERM
ip netns add "${node[0]}" 2>/dev/null || not_permitted
ip netns add "${node[1]}" || not_permitted
ip link add "${cable[0]}" netns "${node[0]}" type veth peer name "${cable[1]}" netns "${node[1]}" 2>/dev/null || not_permitted
for i in 0 1; do
  ip -n "${node[i]}" address add "${address[i]}/24" dev "${cable[i]}" || not_permitted
  ip -n "${node[i]}" link set lo up
  ip -n "${node[i]}" link set "${cable[i]}" up
  # a connection whose other end is silent is given up after 100 s instead of a quarter of an hour, as docs/scale.md advises
  ip netns exec "${node[i]}" sysctl -qw net.ipv4.tcp_retries2=8 || not_permitted
done

on_node() {
  local i=$1
  shift
  exec ip netns exec "${node[i]}" env NODE="$i" ADDRESS="${address[i]}" GLOO_SOCKET_IFNAME="${cable[i]}" \
    MASTER_ADDR="${address[0]}" MASTER_PORT=29650 "$@"
}

on_node 0 "$@" & first=$!
on_node 1 "$@" & second=$!
wait $first; code=$?
wait $second; other=$?
exit $((code > other ? code : other))
