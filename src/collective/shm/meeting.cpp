#include "collective/shm/meeting.h"

#include <fmt/format.h>
#include <optional>

#include "collective/shm/passing.h"

namespace torchspan::collective::shm {
namespace {

/// One that says nothing after it dialed must not keep the others waiting for long.
constexpr Duration kHelloLimit = std::chrono::seconds(10);
/// All are at it when it begins, so that who is not heard of by then cannot come.
constexpr Duration kMeetingLimit = std::chrono::seconds(30);

/// What a member says when it dials: the token, its rank and the size of the memory it passes.
struct Hello {
  Bytes token;
  std::uint32_t rank = 0;
  std::uint64_t size = 0;

  Bytes encode() const {
    ByteWriter writer;
    writer.put_bytes(token);
    writer.put(rank);
    writer.put(size);
    return writer.take();
  }
  static Hello decode(BytesView bytes) {
    ByteReader reader(bytes);
    Hello hello;
    const BytesView token = reader.get_bytes(kTokenBytes);
    hello.token.assign(token.begin(), token.end());
    hello.rank = reader.get<std::uint32_t>();
    hello.size = reader.get<std::uint64_t>();
    reader.expect_end();
    return hello;
  }
  static constexpr std::size_t kBytes = kTokenBytes + 12;
};

/// The ranks of one host pass each other their memory.
class Meeting {
 public:
  Meeting(const std::shared_ptr<WorldLink>& world, const MeetingPlan& plan, Neighbors& neighbors)
      : runtime_(*world->runtime()), neighbors_(neighbors) {
    const auto& leaders = neighbors.leaders;
    leader_ = leaders[static_cast<std::size_t>(plan.self)];
    token_ = neighbors.tokens[static_cast<std::size_t>(leader_)];
    for (std::size_t rank = 0; rank < leaders.size(); ++rank) {
      if (leaders[rank] != leader_) continue;
      if (static_cast<int>(rank) == plan.self) self_ = size();
      people_.push_back(plan.people[rank]);
    }
    if (size() == 1) return;
    deadline_ = earlier(plan.deadline, runtime_.executor.deadline_in(kMeetingLimit));
    hub_ = std::make_shared<Hub>(world, people_, self_, plan.memory);
  }

  void hold() {
    if (size() == 1) return;
    if (self_ == 0) {
      host();
    } else {
      join();
    }
  }

  std::shared_ptr<Hub> take_hub() { return std::move(hub_); }

 private:
  struct Guest {
    Passage passage;
    Descriptor memory;
    std::uint64_t size;
  };

  int size() const { return static_cast<int>(people_.size()); }

  /// A stranger's call, or none at all in time, is nothing.
  std::optional<std::pair<std::uint32_t, Guest>> welcome(Passage passage) {
    try {
      const Deadline deadline = earlier(deadline_, runtime_.executor.deadline_in(kHelloLimit));
      Parcel parcel = passage.receive(Hello::kBytes, deadline);
      const Hello hello = Hello::decode(parcel.bytes);
      if (hello.token != token_ || hello.rank == 0 || hello.rank >= people_.size()) return std::nullopt;
      return std::pair(hello.rank, Guest{std::move(passage), std::move(parcel.descriptor), hello.size});
    } catch (const Error& error) {
      runtime_.log.warning(
          fmt::format("a caller of the group's socket was turned away: {}", error.message()));
      return std::nullopt;
    }
  }

  void host() {
    std::vector<std::optional<Guest>> guests(people_.size());
    for (int missing = size() - 1; missing > 0;) {
      auto guest = welcome(neighbors_.doorway->accept(deadline_));
      if (!guest || guests[guest->first]) continue;
      guests[guest->first].emplace(std::move(guest->second));
      --missing;
    }
    for (int to = 1; to < size(); ++to) {
      for (int of = 0; of < size(); ++of) {
        if (of == to) continue;
        const bool mine = of == 0;
        const Descriptor& memory = mine ? hub_->own()->descriptor() : guests[of]->memory;
        const Hello about{token_, static_cast<std::uint32_t>(of),
                          mine ? hub_->own()->mapping().size() : guests[of]->size};
        guests[to]->passage.send(about.encode(), memory.get(), deadline_);
      }
    }
    for (int rank = 1; rank < size(); ++rank) {
      hub_->add_peer(rank, Mapping(guests[rank]->memory, guests[rank]->size));
      hub_->add_end(rank, guests[rank]->passage.take_socket());
    }
  }

  void join() {
    Passage passage = std::move(*neighbors_.passage);
    const Hello hello{token_, static_cast<std::uint32_t>(self_), hub_->own()->mapping().size()};
    passage.send(hello.encode(), hub_->own()->descriptor().get(), deadline_);
    std::vector<bool> known(people_.size());
    known[static_cast<std::size_t>(self_)] = true;
    for (int missing = size() - 1; missing > 0; --missing) {
      Parcel parcel = passage.receive(Hello::kBytes, deadline_);
      const Hello about = Hello::decode(parcel.bytes);
      if (about.token != token_ || about.rank >= known.size() || known[about.rank]) {
        throw Error(ErrorKind::kInvalid, "the first rank of its host passed memory that makes no sense");
      }
      known[about.rank] = true;
      hub_->add_peer(static_cast<int>(about.rank), Mapping(parcel.descriptor, about.size));
    }
    hub_->add_end(0, passage.take_socket());
  }

  Runtime& runtime_;
  Neighbors& neighbors_;
  int leader_ = 0;
  int self_ = 0;  ///< among people_
  std::vector<Person> people_;
  Bytes token_;
  Deadline deadline_;
  std::shared_ptr<Hub> hub_;
};

}  // namespace

Met meet(const std::shared_ptr<WorldLink>& world, const MeetingPlan& plan, Neighbors neighbors,
         const Gather& gather) {
  Met met{neighbors.leaders, neighbors.reasons};
  std::string trouble;
  try {
    Meeting meeting(world, plan, neighbors);
    meeting.hold();
    met.hub = meeting.take_hub();
  } catch (const Error& error) {
    trouble = error.message();
  }
  neighbors.passage.reset();  // who waits for it at the other end hears that this rank gave up
  ByteWriter writer;
  writer.put_string(trouble);
  const std::vector<Bytes> answers = gather(writer.bytes());
  std::vector<bool> failed(answers.size());
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    const std::string text = ByteReader(answers[rank]).get_string();
    if (text.empty()) continue;
    failed[static_cast<std::size_t>(neighbors.leaders[rank])] = true;
    met.reasons[rank] = fmt::format("{}: {}", plan.people[rank].text, text);
  }
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    if (!failed[static_cast<std::size_t>(neighbors.leaders[rank])]) continue;
    met.leaders[rank] = static_cast<int>(rank);
    if (static_cast<int>(rank) == plan.self) met.hub.reset();
  }
  return met;
}

}  // namespace torchspan::collective::shm
