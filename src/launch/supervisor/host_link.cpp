#include "launch/supervisor/host_link.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <string_view>
#include <utility>

namespace torchspan::launch {

Bytes encode_host_message(const HostMessage& message) {
  ByteWriter writer;
  writer.put(message.version);
  writer.put(static_cast<std::uint8_t>(message.kind));
  writer.put(message.id);
  writer.put(static_cast<std::uint8_t>(message.brief ? 1 : 0));
  return writer.take();
}

std::optional<HostMessage> decode_host_message(BytesView bytes) {
  constexpr std::size_t kFixed = sizeof(std::uint32_t) + sizeof(std::uint8_t) + sizeof(std::uint64_t);
  if (bytes.size() < kFixed) return std::nullopt;
  ByteReader reader(bytes);
  HostMessage message;
  message.version = reader.get<std::uint32_t>();
  const auto kind = reader.get<std::uint8_t>();
  if (kind != 1 && kind != 2) return std::nullopt;
  message.kind = static_cast<HostMessage::Kind>(kind);
  message.id = reader.get<std::uint64_t>();
  if (message.version != HostMessage::kVersion) return message;
  if (reader.left() != 1) return std::nullopt;
  const auto brief = reader.get<std::uint8_t>();
  if (brief > 1) return std::nullopt;
  message.brief = brief == 1;
  return message;
}

namespace {

/// Of other launchers, which ask one at a time.
constexpr std::size_t kMostAsked = 1024;
constexpr Duration kWhileDescribing = std::chrono::milliseconds(2);

}  // namespace

void send_to_host(net::Channel& channel, const HostMessage& header, const std::string& body) {
  const auto text = std::make_shared<const std::string>(body);
  const Segment segment{reinterpret_cast<const std::byte*>(text->data()), text->size(), text};
  const std::size_t count = body.empty() ? 0 : 1;
  channel.send(encode_host_message(header), std::span(&segment, count));
}

HostAnswers::HostAnswers(Executor& executor, int node)
    : executor_(executor), node_(node), parker_(executor.make_parker()) {
  thread_ = executor_.spawn("torchspan.answer", [this] { run(); });
}

HostAnswers::~HostAnswers() {
  stopping_ = changing_ = true;
  parker_->unpark();
  thread_.join();
}

void HostAnswers::set_describe(Describe describe) {
  changing_ = true;
  {
    MutexLock lock(mutex_);
    describe_ = describe ? std::make_shared<const Describe>(std::move(describe)) : nullptr;
  }
  for (;; executor_.sleep(kWhileDescribing)) {
    MutexLock lock(mutex_);
    if (!describing_) break;
  }
  changing_ = false;
}

void HostAnswers::add(std::shared_ptr<net::Channel> channel, const HostMessage& question) {
  {
    MutexLock lock(mutex_);
    if (asked_.size() < kMostAsked) asked_.push_back({std::move(channel), question});
  }
  parker_->unpark();
}

void HostAnswers::run() {
  while (!stopping_) {
    parker_->park(Deadline::never());
    std::map<bool, std::string> reports;  // one answer for all that ask at the same time
    for (const Asked& asked : take()) {
      HostMessage header = asked.message;
      header.kind = HostMessage::Kind::kAnswer;
      const bool known = std::exchange(header.version, HostMessage::kVersion) == HostMessage::kVersion;
      if (known && !reports.contains(header.brief)) {
        reports[header.brief] = encode_host_report(describe(header.brief));
      }
      try {
        send_to_host(*asked.channel, header, known ? reports[header.brief] : "");
      } catch (const Error&) {
        asked.channel->close();  // the asking launcher has ended
      }
    }
  }
}

std::deque<HostAnswers::Asked> HostAnswers::take() {
  MutexLock lock(mutex_);
  return std::exchange(asked_, {});
}

HostReport HostAnswers::describe(bool brief) {
  std::shared_ptr<const Describe> describe;
  {
    MutexLock lock(mutex_);
    describe = describe_;
    describing_ = describe != nullptr;
  }
  HostReport report{.trouble = "no workers run there at the moment", .workers = {}};
  if (describe) {
    report = (*describe)(brief, changing_);
    describe.reset();
    MutexLock lock(mutex_);
    describing_ = false;
  }
  report.node = node_;
  return report;
}

namespace {

constexpr int kPollsBetweenLooks = 64;
constexpr std::size_t kMostAnswer = std::size_t{64} << 20;
/// How often a waiting thread looks whether it must stop.
constexpr Duration kLinkLook = std::chrono::milliseconds(50);

HostReport absent(int node, std::string trouble) {
  return {.node = node, .host = "", .trouble = std::move(trouble), .workers = {}};
}

HostReport read_answer(const HostMessage& header, const net::Message& message) {
  if (header.version != HostMessage::kVersion) {
    return absent(
        0, fmt::format("its launcher speaks version {} of the launchers' requests, this one version {}: "
                       "run the same version of TorchSpan on all hosts",
                       header.version, HostMessage::kVersion));
  }
  if (message.segments.size() == 1 && message.segments[0].size <= kMostAnswer) {
    const Buffer& body = message.segments[0];
    const std::string_view text(reinterpret_cast<const char*>(body.data), body.size);
    if (auto report = decode_host_report(text)) return std::move(*report);
  }
  return absent(
      0,
      "its launcher answered with something else than the state of its workers: run the same version of "
      "TorchSpan on all hosts");
}

std::string describe_end(const Error& reason) {
  if (reason.kind() == ErrorKind::kDisconnected) {
    return fmt::format("its launcher has ended, or its host is gone ({})", reason.message());
  }
  return fmt::format("its launcher cannot be asked: {}", reason.message());
}

}  // namespace

/// A question of this launcher. Settled answers have a value.
struct HostLink::Question {
  std::unique_ptr<Parker> parker;
  std::vector<std::shared_ptr<net::Channel>> channels;  ///< by node; null: not asked
  std::vector<std::optional<HostReport>> answers;       ///< by node

  bool complete() const {
    return std::ranges::all_of(answers, [](const auto& answer) { return answer.has_value(); });
  }
};

HostLink::HostLink(Executor& executor, int node, int nodes)
    : executor_(executor),
      node_(node),
      nodes_(nodes),
      addresses_(static_cast<std::size_t>(nodes)),
      answers_(executor, node) {}

HostLink::~HostLink() {
  stopping_ = true;
  if (transport_) transport_->wake();
  driver_.join();
}

std::string HostLink::listen(const rendezvous::Membership& world) {
  try {
    rendezvous::Membership::Listening listening = world.listen("questions", *this);
    transport_ = std::move(listening.transport);
    driver_ = executor_.spawn("torchspan.link", [this] { drive(); });
    listening_ = true;
    return listening.address;
  } catch (const Error& error) {
    set_trouble(fmt::format("this launcher cannot ask other hosts: {}", error.message()));
    return "";
  }
}

void HostLink::set_addresses(std::vector<std::string> addresses) {
  addresses.resize(static_cast<std::size_t>(nodes_));
  MutexLock lock(mutex_);
  addresses_ = std::move(addresses);
}

void HostLink::set_trouble(std::string trouble) {
  MutexLock lock(mutex_);
  trouble_ = std::move(trouble);
}

void HostLink::drive() {
  while (!stopping_) {
    for (int i = 0; i < kPollsBetweenLooks && !stopping_ && transport_->poll(); ++i) {
    }
    if (!stopping_) transport_->wait(Deadline::never());
  }
}

void HostLink::on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  const auto header = decode_host_message(message.header);
  if (!header) return channel->close();
  if (header->kind == HostMessage::Kind::kAnswer) {
    return settle(header->id, *channel, read_answer(*header, message));
  }
  answers_.add(channel, *header);
}

void HostLink::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  std::uint64_t id = 0;
  {
    MutexLock lock(mutex_);
    for (const auto& [number, question] : questions_) {
      if (std::ranges::find(question->channels, channel) != question->channels.end()) id = number;
    }
  }
  // At the deadline of the question, collect() says so.
  if (id != 0 && reason.kind() != ErrorKind::kTimedOut) settle(id, *channel, absent(0, describe_end(reason)));
}

/// Notes the answer that came on a channel, unless there is one.
void HostLink::settle(std::uint64_t id, const net::Channel& channel, HostReport report) {
  MutexLock lock(mutex_);
  const auto found = questions_.find(id);
  if (found == questions_.end()) return;
  Question& question = *found->second;
  const auto place = std::ranges::find(question.channels, &channel, &std::shared_ptr<net::Channel>::get);
  if (place == question.channels.end()) return;
  const auto node = static_cast<std::size_t>(place - question.channels.begin());
  if (question.answers[node]) return;
  if (report.trouble.empty() && report.node != static_cast<int>(node)) {
    report = absent(0, fmt::format("the launcher of host {} answered at its address", report.node));
  }
  report.node = static_cast<int>(node);
  question.answers[node] = std::move(report);
  question.parker->unpark();
}

/// Asks one launcher. What prevents it is its answer.
void HostLink::ask(Question& question, int node, const HostMessage& header, Deadline until) {
  const auto place = static_cast<std::size_t>(node);
  const std::string& address = addresses_[place];
  std::optional<HostReport>& answer = question.answers[place];
  if (!trouble_.empty() || !listening_) {
    answer = absent(node, trouble_.empty() ? "the launchers have not connected" : trouble_);
  } else if (address.empty()) {
    answer = absent(
        node,
        "its launcher cannot be asked: it runs another version of TorchSpan, or found no free port for "
        "questions");
  } else {
    try {
      question.channels[place] = transport_->connect(address, until);
      send_to_host(*question.channels[place], header, "");
    } catch (const Error& error) {
      answer = absent(node, describe_end(error));
    }
  }
}

std::vector<HostReport> HostLink::collect(bool brief, Deadline until, const std::atomic<bool>& stopping) {
  const TimePoint began = executor_.now();
  const auto count = static_cast<std::size_t>(nodes_);
  Question question{executor_.make_parker(), std::vector<std::shared_ptr<net::Channel>>(count),
                    std::vector<std::optional<HostReport>>(count)};
  question.answers[static_cast<std::size_t>(node_)] = absent(node_, "");
  HostMessage header{.kind = HostMessage::Kind::kQuestion, .id = 0, .brief = brief};
  {
    // Under the lock, so that the end of a channel finds the question.
    MutexLock lock(mutex_);
    header.id = ++last_id_;
    questions_[header.id] = &question;
    for (int node = 0; node < nodes_; ++node) {
      if (node != node_) ask(question, node, header, until);
    }
  }
  for (bool complete = false; !complete && !until.passed(executor_.now()) && !stopping;) {
    question.parker->park(earlier(until, executor_.deadline_in(kLinkLook)));
    MutexLock lock(mutex_);
    complete = question.complete();
  }
  {
    MutexLock lock(mutex_);
    questions_.erase(header.id);
  }
  std::vector<HostReport> reports;
  for (int node = 0; node < nodes_; ++node) {
    const auto place = static_cast<std::size_t>(node);
    if (question.channels[place]) question.channels[place]->close();
    if (node == node_) continue;
    const std::string late =
        stopping
            ? "the request to it was abandoned, because this launcher continues"
            : fmt::format(
                  "its launcher did not answer within {:.1f} s: it is stopped, or its host cannot be reached",
                  to_seconds(executor_.now() - began));
    reports.push_back(question.answers[place] ? std::move(*question.answers[place]) : absent(node, late));
  }
  return reports;
}

}  // namespace torchspan::launch
