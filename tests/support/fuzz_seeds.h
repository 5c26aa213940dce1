#pragma once
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/bytes.h>

namespace torchspan::testing {

/// For LLVMFuzzerInitialize: if the program's first argument is --seeds=FOLDER, writes the seeds from `make`
/// as files there and ends the process. The encoders make the seeds each time, so they are always up to date.
template <class Make>
int offer_seeds(const int* count, char*** arguments, Make make) {
  constexpr std::string_view kOption = "--seeds=";
  if (*count < 2 || !std::string_view((*arguments)[1]).starts_with(kOption)) return 0;
  const std::string folder = (*arguments)[1] + kOption.size();
  std::size_t number = 0;
  for (const Bytes& seed : make()) {
    std::ofstream file(folder + "/seed" + std::to_string(number++), std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
    if (!file.flush()) std::exit(1);
  }
  std::exit(number == 0 ? 1 : 0);
}

inline Bytes joined(std::initializer_list<BytesView> parts) {
  Bytes all;
  for (const BytesView part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

inline Bytes bytes_of(std::initializer_list<int> numbers) {
  Bytes bytes;
  for (const int number : numbers) bytes.push_back(static_cast<std::byte>(number));
  return bytes;
}

}  // namespace torchspan::testing
