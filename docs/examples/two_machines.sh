#!/usr/bin/env bash
# Two machines on one: network namespaces with a cable between them. Run with: sudo bash two_machines.sh
# Ranks in different namespaces share no memory here, so that what they say goes over TCP.
set -euo pipefail
cd "$(dirname "$0")"
a=collectives-$$-a
b=collectives-$$-b
cleanup() {
  ip netns delete "$a" 2>/dev/null || true
  ip netns delete "$b" 2>/dev/null || true
}
trap cleanup EXIT

ip netns add "$a"
ip netns add "$b"
ip link add cable netns "$a" type veth peer name cable netns "$b"
ip -n "$a" address add 198.18.7.1/24 dev cable
ip -n "$b" address add 198.18.7.2/24 dev cable
for machine in "$a" "$b"; do
  ip -n "$machine" link set lo up
  ip -n "$machine" link set cable up
done

# Both machines get the same secret through the environment, which no other user sees.
COLLECTIVES_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export COLLECTIVES_SECRET

run() {  # run MACHINE NODE_RANK
  ip netns exec "$1" env OMP_NUM_THREADS=1 COLLECTIVES_SOCKET_IFNAME=cable \
    torchrun --nnodes 2 --node-rank "$2" --nproc-per-node 1 \
    --master-addr 198.18.7.1 --master-port 29500 "${PROGRAM:-round_robin_ddp.py}"
}
run "$b" 1 &
run "$a" 0
wait $!
echo "worked: two machines, joined by TCP"
