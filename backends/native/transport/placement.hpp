// Which ranks share memory.
//
// Words. A *machine* is a set of ranks that proved by attaching to one segment that they share memory. Its
// *leader* is its lowest rank. *Local* ranks are those of one's own machine, *remote* all others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace collectives {

// Of one rank; the same on all ranks but for `machine`.
struct Placement {
  std::vector<std::vector<int>> machines;  // ranks, ascending; machines in order of their leaders
  std::vector<std::string> hosts;  // host name by machine, for messages; empty where all is one machine
  std::vector<int> machine_of;     // by rank
  int machine = 0;                 // this rank's

  bool several() const noexcept { return machines.size() > 1; }
  int count() const noexcept { return static_cast<int>(machines.size()); }
  const std::vector<int>& local() const noexcept { return machines[static_cast<std::size_t>(machine)]; }
  int leader_of(int other) const noexcept { return machines[static_cast<std::size_t>(other)].front(); }
  int leader() const noexcept { return leader_of(machine); }
  bool leads(int rank) const noexcept { return leader_of(of(rank)) == rank; }
  bool is_local(int rank) const noexcept { return of(rank) == machine; }
  int of(int rank) const noexcept { return machine_of[static_cast<std::size_t>(rank)]; }
  const std::string& host_of(int rank) const noexcept { return hosts[static_cast<std::size_t>(of(rank))]; }
};

// The placement of `rank`; the machines may come in any order.
inline Placement place(std::vector<std::vector<int>> machines, std::vector<std::string> hosts, int rank) {
  std::vector<std::pair<std::vector<int>, std::string>> sorted;
  hosts.resize(machines.size());
  std::size_t ranks = 0;
  for (std::size_t m = 0; m < machines.size(); ++m) {
    std::sort(machines[m].begin(), machines[m].end());
    ranks += machines[m].size();
    sorted.emplace_back(std::move(machines[m]), std::move(hosts[m]));
  }
  std::sort(sorted.begin(), sorted.end());
  Placement placement;
  placement.machine_of.resize(ranks);
  for (auto& [members, host] : sorted) {
    for (const int member : members) {
      const int machine = placement.count();
      placement.machine_of[static_cast<std::size_t>(member)] = machine;
      if (member == rank) placement.machine = machine;
    }
    placement.machines.push_back(std::move(members));
    placement.hosts.push_back(std::move(host));
  }
  return placement;
}

// All ranks on one machine.
inline Placement one_machine(int size, int rank) {
  std::vector<int> all(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) all[static_cast<std::size_t>(r)] = r;
  return place({std::move(all)}, {}, rank);
}

}  // namespace collectives
