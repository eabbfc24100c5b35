// Tests of groups that span machines; the machines are sets of threads, joined by TCP.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace collectives {

std::vector<std::pair<const char*, std::function<void()>>> machine_tests();

}  // namespace collectives
