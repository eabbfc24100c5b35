// What a rank of a group that spans machines communicates through, beside shared memory.
#pragma once

#include <utility>

#include "transport/arrival_exchange.hpp"
#include "transport/connection_manager.hpp"
#include "transport/stream_pool.hpp"

namespace collectives {

struct MachineTransport {
  // The context must outlive it.
  explicit MachineTransport(RankContext& context)
      : arrivals(context, connections),
        connections(context, context.take_network()),
        streams(context, connections) {}

  // In this order: the connection manager announces the departure before the arrivals' sockets are closed.
  ArrivalExchange arrivals;
  ConnectionManager connections;
  StreamPool streams;
};

}  // namespace collectives
