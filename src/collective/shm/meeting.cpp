#include "collective/shm/meeting.h"

#include <fmt/format.h>
#include <optional>

#include "collective/shm/passing.h"

namespace torchspan::collective::shm {
namespace {

constexpr std::size_t kTokenBytes = 32;
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

std::string hex(BytesView bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

/// Rank 0's invitation: where it listens, and what callers have to know.
struct Invitation {
  std::string name;
  Bytes token;
  std::string refusal = {};  ///< why there is none

  Bytes encode() const {
    ByteWriter writer;
    writer.put_string(refusal);
    writer.put_string(name);
    writer.put_bytes(token);
    return writer.take();
  }
  static Invitation decode(BytesView bytes) {
    ByteReader reader(bytes);
    Invitation invitation;
    invitation.refusal = reader.get_string();
    invitation.name = reader.get_string();
    const BytesView token = reader.get_bytes(reader.left());
    invitation.token.assign(token.begin(), token.end());
    return invitation;
  }
};

class Meeting {
 public:
  Meeting(Runtime& runtime, const MeetingPlan& plan) : runtime_(runtime), plan_(plan) {
    hub_ = std::make_shared<Hub>(runtime, plan.people, plan.self, Arena::make(plan.shared_bytes));
  }

  Invitation invite() {
    if (plan_.self != 0) return {};
    token_ = random_bytes(kTokenBytes);
    doorway_.emplace(runtime_.executor, "torchspan-" + hex(random_bytes(16)));
    return {doorway_->name(), token_};
  }

  void accept(const Invitation& invitation) {
    deadline_ = earlier(plan_.deadline, runtime_.executor.deadline_in(kMeetingLimit));
    if (plan_.self == 0) {
      host();
    } else {
      join(invitation);
    }
  }

  std::shared_ptr<Hub> take_hub() { return std::move(hub_); }

 private:
  struct Guest {
    Passage passage;
    Descriptor memory;
    std::uint64_t size;
  };

  int size() const { return static_cast<int>(plan_.people.size()); }

  /// A stranger's call, or none at all in time, is nothing.
  std::optional<std::pair<std::uint32_t, Guest>> welcome(Passage passage) {
    try {
      const Deadline deadline = earlier(deadline_, runtime_.executor.deadline_in(kHelloLimit));
      Parcel parcel = passage.receive(Hello::kBytes, deadline);
      const Hello hello = Hello::decode(parcel.bytes);
      if (hello.token != token_ || hello.rank == 0 || hello.rank >= plan_.people.size()) return std::nullopt;
      return std::pair(hello.rank, Guest{std::move(passage), std::move(parcel.descriptor), hello.size});
    } catch (const Error& error) {
      runtime_.log.warning(
          fmt::format("a caller of the group's socket was turned away: {}", error.message()));
      return std::nullopt;
    }
  }

  void host() {
    std::vector<std::optional<Guest>> guests(plan_.people.size());
    for (int missing = size() - 1; missing > 0;) {
      auto guest = welcome(doorway_->accept(deadline_));
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

  void join(const Invitation& invitation) {
    Passage passage = dial(runtime_.executor, invitation.name);
    const Hello hello{invitation.token, static_cast<std::uint32_t>(plan_.self),
                      hub_->own()->mapping().size()};
    passage.send(hello.encode(), hub_->own()->descriptor().get(), deadline_);
    std::vector<bool> known(plan_.people.size());
    known[static_cast<std::size_t>(plan_.self)] = true;
    for (int missing = size() - 1; missing > 0; --missing) {
      Parcel parcel = passage.receive(Hello::kBytes, deadline_);
      const Hello about = Hello::decode(parcel.bytes);
      if (about.token != invitation.token || about.rank >= known.size() || known[about.rank]) {
        throw Error(ErrorKind::kInvalid, "rank 0 passed memory that makes no sense");
      }
      known[about.rank] = true;
      hub_->add_peer(static_cast<int>(about.rank), Mapping(parcel.descriptor, about.size));
    }
    hub_->add_end(0, passage.take_socket());
  }

  Runtime& runtime_;
  const MeetingPlan& plan_;
  std::shared_ptr<Hub> hub_;
  Deadline deadline_;
  Bytes token_;
  std::optional<Doorway> doorway_;
};

[[noreturn]] void throw_unable(const MeetingPlan& plan, std::size_t rank, const std::string& why) {
  throw Error(ErrorKind::kUnsupported, fmt::format("the ranks of this group cannot share memory: {}: {}",
                                                   plan.people[rank].text, why));
}

/// Tells everybody whether it went well here; throws on all ranks what the first unlucky one says.
void agree(const MeetingPlan& plan, const Gather& gather, const std::string& trouble) {
  ByteWriter writer;
  writer.put_string(trouble);
  const std::vector<Bytes> answers = gather(writer.bytes());
  for (std::size_t rank = 0; rank < answers.size(); ++rank) {
    const std::string text = ByteReader(answers[rank]).get_string();
    if (!text.empty()) throw_unable(plan, rank, text);
  }
}

}  // namespace

std::shared_ptr<Hub> meet(Runtime& runtime, const MeetingPlan& plan, const Gather& gather) {
  std::optional<Meeting> meeting;
  Invitation invitation;
  try {
    meeting.emplace(runtime, plan);
    invitation = meeting->invite();
  } catch (const Error& error) {
    invitation.refusal = error.message();
  }
  std::vector<Invitation> invitations;
  for (const Bytes& answer : gather(invitation.encode())) invitations.push_back(Invitation::decode(answer));
  for (std::size_t rank = 0; rank < invitations.size(); ++rank) {
    if (!invitations[rank].refusal.empty()) throw_unable(plan, rank, invitations[rank].refusal);
  }
  std::string trouble;
  try {
    meeting->accept(invitations[0]);
  } catch (const Error& error) {
    trouble = error.message();
  }
  agree(plan, gather, trouble);
  return meeting->take_hub();
}

}  // namespace torchspan::collective::shm
