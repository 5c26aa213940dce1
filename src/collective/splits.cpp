#include "collective/splits.h"

#include <algorithm>
#include <tuple>

namespace torchspan::collective {

std::vector<int> ranks_of_split(const std::function<std::vector<Bytes>(BytesView mine)>& gather, int color,
                                int key) {
  ByteWriter writer;
  writer.put(color);
  writer.put(key);
  struct Choice {
    int color;
    int key;
    int rank;
  };
  std::vector<Choice> choices;
  for (const Bytes& answer : gather(writer.bytes())) {
    ByteReader reader(answer);
    const int their_color = reader.get<int>();
    const int their_key = reader.get<int>();
    choices.push_back({their_color, their_key, static_cast<int>(choices.size())});
  }
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
  });
  std::vector<int> ranks;
  for (const Choice& choice : choices) {
    if (choice.color == color) ranks.push_back(choice.rank);
  }
  return ranks;
}

}  // namespace torchspan::collective
