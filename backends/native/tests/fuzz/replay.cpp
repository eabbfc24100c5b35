// Runs a fuzz target on every file of a folder, and for some seconds (10) on changed copies of them, for
// compilers without libFuzzer:
//   fuzz_TARGET FOLDER [SECONDS]
// With clang the target searches by itself: clang++ -fsanitize=fuzzer,address,undefined, without this file.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;

Input read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The same changes in every run, as far as it gets.
Input changed(Input input, const Input& other, std::mt19937& random) {
  const auto below = [&random](std::size_t end) {
    return static_cast<std::size_t>(random() % std::max(end, 1UL));
  };
  for (std::size_t times = 1 + below(4); times > 0; --times) {
    const auto place = static_cast<std::ptrdiff_t>(below(input.size()));
    switch (below(5)) {
      case 0:  // a bit
        if (!input.empty())
          input[static_cast<std::size_t>(place)] ^= static_cast<std::uint8_t>(1U << below(8));
        break;
      case 1:  // a byte, often one at an end of its range
        if (!input.empty()) {
          constexpr std::uint8_t kBytes[] = {0, 1, 7, 8, 127, 128, 254, 255};
          input[static_cast<std::size_t>(place)] = kBytes[below(8)];
        }
        break;
      case 2:  // less
        input.erase(
            input.begin() + place,
            input.begin() + place +
                static_cast<std::ptrdiff_t>(below(input.size() - static_cast<std::size_t>(place) + 1)));
        break;
      case 3:  // a piece again
        if (!input.empty()) {
          const Input piece(input.begin() + place,
                            input.begin() + place +
                                static_cast<std::ptrdiff_t>(std::min<std::size_t>(
                                    32, input.size() - static_cast<std::size_t>(place))));
          input.insert(input.begin() + static_cast<std::ptrdiff_t>(below(input.size() + 1)), piece.begin(),
                       piece.end());
        }
        break;
      default:  // the end of another
        input.resize(static_cast<std::size_t>(place));
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size() + 1)),
                     other.end());
    }
  }
  return input;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "usage: %s FOLDER [SECONDS]\n", arguments[0]);
    return 2;
  }
  const std::chrono::seconds limit(count > 2 ? std::strtol(arguments[2], nullptr, 10) : 10);
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(arguments[1])) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Input> inputs;
  for (const auto& path : paths) {
    std::printf("%s\n", path.filename().c_str());
    std::fflush(stdout);
    inputs.push_back(read(path));
    LLVMFuzzerTestOneInput(inputs.back().data(), inputs.back().size());
  }
  if (inputs.empty()) {
    std::fprintf(stderr, "nothing in %s\n", arguments[1]);
    return 2;
  }
  std::mt19937 random(1);
  const auto end = std::chrono::steady_clock::now() + limit;
  std::size_t copies = 0;
  for (; std::chrono::steady_clock::now() < end; ++copies) {
    const Input& input = inputs[copies % inputs.size()];
    const Input tried = changed(input, inputs[random() % inputs.size()], random);
    LLVMFuzzerTestOneInput(tried.data(), tried.size());
  }
  std::printf("all passed, and %zu changed copies\n", copies);
  return 0;
}
