// Which ranks share memory. A machine is a set of ranks that proved by attaching to one segment that they do;
// its lowest rank is its leader. Local ranks are those of one's own machine, remote ranks all others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace collectives {

// As one rank sees it; the same on all ranks but for `machine`.
struct Topology {
  std::vector<std::vector<int>> machines;  // ranks, ascending; machines in order of their leaders
  std::vector<std::string> hosts;  // host name by machine, for messages; empty where all is one machine
  std::vector<int> machine_of;     // by rank
  int machine = 0;                 // this rank's

  bool spans_machines() const noexcept { return machines.size() > 1; }
  int count() const noexcept { return static_cast<int>(machines.size()); }
  const std::vector<int>& local() const noexcept { return machines[static_cast<std::size_t>(machine)]; }
  int leader_of(int other) const noexcept { return machines[static_cast<std::size_t>(other)].front(); }
  int leader() const noexcept { return leader_of(machine); }
  bool leads(int rank) const noexcept { return leader_of(of(rank)) == rank; }
  bool is_local(int rank) const noexcept { return of(rank) == machine; }
  int of(int rank) const noexcept { return machine_of[static_cast<std::size_t>(rank)]; }
  const std::string& host_of(int rank) const noexcept { return hosts[static_cast<std::size_t>(of(rank))]; }
};

// The topology as `rank` sees it; the machines may come in any order.
inline Topology make_topology(std::vector<std::vector<int>> machines, std::vector<std::string> hosts,
                              int rank) {
  std::vector<std::pair<std::vector<int>, std::string>> sorted;
  hosts.resize(machines.size());
  std::size_t ranks = 0;
  for (std::size_t m = 0; m < machines.size(); ++m) {
    std::sort(machines[m].begin(), machines[m].end());
    ranks += machines[m].size();
    sorted.emplace_back(std::move(machines[m]), std::move(hosts[m]));
  }
  std::sort(sorted.begin(), sorted.end());
  Topology topology;
  topology.machine_of.resize(ranks);
  for (auto& [members, host] : sorted) {
    for (const int member : members) {
      const int machine = topology.count();
      topology.machine_of[static_cast<std::size_t>(member)] = machine;
      if (member == rank) topology.machine = machine;
    }
    topology.machines.push_back(std::move(members));
    topology.hosts.push_back(std::move(host));
  }
  return topology;
}

// All ranks on one machine.
inline Topology single_machine(int size, int rank) {
  std::vector<int> all(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) all[static_cast<std::size_t>(r)] = r;
  return make_topology({std::move(all)}, {}, rank);
}

}  // namespace collectives
