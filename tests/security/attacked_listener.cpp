#include "tests/security/attacked_listener.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <random>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "net/api/local.h"
#include "net/api/stream.h"
#include "net/handshake.h"
#include "net/tls/tls_address.h"
#include "net/tls/tls_session.h"

namespace torchspan::net::conformance {
namespace {

constexpr Duration kPatience = std::chrono::seconds(30);

Secret another_secret() { return Secret::from_bytes(bytes_of("the secret of another job")); }

/// A transport with a thread and one channel.
class HonestPeer final : public Honest, private Handler {
 public:
  HonestPeer(AttackedListener& listener, const std::string& address)
      : executor_(listener.executor()),
        random_(std::random_device()()),
        news_(executor_.make_parker()),
        transport_(listener.make_transport(*this, honest_options())),
        channel_(transport_->connect(address, executor_.deadline_in(kPatience))),
        thread_(executor_.spawn("honest", [this] {
          while (!stopping_) {
            transport_->poll();
            transport_->wait(Deadline::never());
          }
        })) {}
  ~HonestPeer() override {
    stopping_ = true;
    transport_->wake();
    thread_.join();
  }

  bool exchange() override {
    const Parcel parcel = random_parcel(random_);
    try {
      send(*channel_, parcel);
    } catch (const Error&) {
      return false;
    }
    const Deadline deadline = executor_.deadline_in(kPatience);
    for (;;) {
      {
        MutexLock lock(mutex_);
        if (!received_.empty()) {
          EXPECT_TRUE(received_.front() == parcel);
          EXPECT_EQ(received_.size(), 1u);
          received_.clear();
          return true;
        }
        if (!closed_.empty()) return false;
      }
      if (!news_->park(deadline)) {
        ADD_FAILURE() << "no answer came";
        return false;
      }
    }
  }

  std::string why() const override {
    MutexLock lock(mutex_);
    return closed_;
  }

 private:
  void on_accepted(const std::shared_ptr<Channel>&) override {}
  void on_message(const std::shared_ptr<Channel>&, Message message) override {
    {
      MutexLock lock(mutex_);
      received_.push_back(parcel_of(message));
    }
    news_->unpark();
  }
  void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override {
    {
      MutexLock lock(mutex_);
      closed_ = reason.what();
    }
    news_->unpark();
  }

  Executor& executor_;
  std::mt19937 random_;
  const std::unique_ptr<Parker> news_;
  mutable Mutex mutex_;
  std::vector<Parcel> received_ TORCHSPAN_GUARDED_BY(mutex_);
  std::string closed_ TORCHSPAN_GUARDED_BY(mutex_);  ///< the reason, once it is closed
  std::atomic<bool> stopping_{false};
  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Channel> channel_;
  Thread thread_;
};

/// A worker of the victim's open world.
class HonestMember final : public Honest {
 public:
  HonestMember(AttackedListener& listener, const std::string& address, const std::string& name)
      : listener_(listener), runtime_(listener.executor(), name, LogLevel::kOff) {
    rendezvous::MembershipOptions join;
    join.name = name;
    join.rank = rendezvous::kAnyRank;
    join.world_size = rendezvous::kOpenWorld;
    join.store_address = address;
    join.timeout = kPatience;
    membership_ = rendezvous::Membership::join(
        runtime_,
        [&listener](const std::string&, Handler& handler) {
          return listener.make_transport(handler, honest_options());
        },
        join);
  }
  ~HonestMember() override { membership_->leave(listener_.executor().deadline_in(kPatience)); }
  bool exchange() override {
    Bytes mine(1 + (number_ * 37) % 3000, static_cast<std::byte>(number_));
    ++number_;
    try {
      const auto all = membership_->all_gather_bytes("alone", mine, {membership_->self().rank},
                                                     listener_.executor().deadline_in(kPatience));
      EXPECT_TRUE(all == std::vector<Bytes>{mine});
      return true;
    } catch (const Error& error) {
      why_ = error.what();
      return false;
    }
  }
  std::string why() const override { return why_; }

 private:
  AttackedListener& listener_;
  std::string why_;
  Runtime runtime_;
  std::uint64_t number_ = 0;
  std::unique_ptr<rendezvous::Membership> membership_;
};

std::string read_line(const Descriptor& from) {
  std::string line;
  for (char c; ::read(from.get(), &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

}  // namespace

AttackedListener::AttackedListener(ListenerKind kind, int descriptors) : kind_(std::move(kind)) {
  std::vector<std::string> arguments = {
      "unauthenticated_victim", (kind_.store ? "store-" : "") + kind_.transport, other_address("listener")};
  if (kind_.certificates) {
    ours_ = std::make_unique<torchspan::testing::TestAuthority>(folder_.path(), "ours");
    foreign_ = std::make_unique<torchspan::testing::TestAuthority>(folder_.path(), "foreign");
    for (const auto* authority : {&ours_, &foreign_})
      (*authority)->issue("worker", "DNS:localhost,IP:127.0.0.1");
    const TlsOptions tls = tls_options(true);
    arguments.insert(arguments.end(), {tls.certificate_file, tls.key_file, tls.authority_file});
  }
  int input[2], output[2];
  if (::pipe2(input, O_CLOEXEC) != 0 || ::pipe2(output, O_CLOEXEC) != 0) std::abort();
  to_victim_.reset(input[1]);
  from_victim_.reset(output[0]);
  Descriptor its_input(input[0]), its_output(output[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, its_input.get(), 0);
  posix_spawn_file_actions_adddup2(&actions, its_output.get(), 1);
  const std::string program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "unauthenticated_victim";
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) variables.emplace_back(*entry);
  if (descriptors != 0) variables.push_back("TORCHSPAN_TEST_DESCRIPTORS=" + std::to_string(descriptors));
  const auto pointers = [](std::vector<std::string>& texts) {
    std::vector<char*> list;
    for (std::string& text : texts) list.push_back(text.data());
    list.push_back(nullptr);
    return list;
  };
  EXPECT_EQ(::posix_spawn(&victim_, program.c_str(), &actions, nullptr, pointers(arguments).data(),
                          pointers(variables).data()),
            0)
      << program;
  posix_spawn_file_actions_destroy(&actions);
  its_output.reset();
  address_ = read_line(from_victim_);
  EXPECT_FALSE(address_.empty()) << "the victim did not start";
}

AttackedListener::~AttackedListener() {
  to_victim_.reset();
  if (victim_ <= 0) return;
  ::kill(victim_, SIGCONT);
  int status = 0;
  const Deadline deadline = executor_->deadline_in(kPatience);
  while (::waitpid(victim_, &status, WNOHANG) == 0) {
    if (deadline.passed(executor_->now())) {
      ADD_FAILURE() << "the victim did not end";
      ::kill(victim_, SIGKILL);
    }
    executor_->sleep(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(status, 0) << "the victim failed";
}

bool AttackedListener::alive() const { return ::waitpid(victim_, nullptr, WNOHANG) == 0; }
void AttackedListener::send_signal(int signal) const { ::kill(victim_, signal); }

std::size_t AttackedListener::open_files() const {
  const std::filesystem::directory_iterator all("/proc/" + std::to_string(victim_) + "/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

std::size_t AttackedListener::resident_bytes() const {
  std::ifstream file("/proc/" + std::to_string(victim_) + "/statm");
  std::size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

Duration AttackedListener::cpu_time() const {
  std::ifstream file("/proc/" + std::to_string(victim_) + "/stat");
  std::string text;
  std::getline(file, text);
  std::istringstream rest(text.substr(text.rfind(')') + 2));
  std::string skipped;
  for (int i = 0; i < 11; ++i) rest >> skipped;
  std::int64_t user = 0, system = 0;
  rest >> user >> system;
  return std::chrono::milliseconds((user + system) * 1000 / ::sysconf(_SC_CLK_TCK));
}

Counts AttackedListener::counts() {
  Counts counts{};
  if (::write(to_victim_.get(), "?", 1) != 1) return counts;
  std::istringstream line(read_line(from_victim_));
  line >> counts.accepted >> counts.refused >> counts.denied >> counts.overloaded;
  return counts;
}

Address AttackedListener::parsed(const std::string& address) const {
  return is_tls() ? *numeric_address(parse_tls_address(address)) : parse_address(address);
}

Descriptor AttackedListener::dial() const {
  const Address address = parsed(address_);
  Descriptor socket(::socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return {};
  if (::connect(socket.get(), address.raw(), address.socket_size) != 0 && errno != EINPROGRESS) return {};
  return socket;
}

Bytes AttackedListener::opening() const {
  if (!is_tls()) {
    HandshakeOptions options{.secret = another_secret(), .peer = "victim"};
    draw_nonce(options.nonce);
    return Handshake(Role::kDialer, options).take_output();
  }
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) std::abort();
  const Descriptor ours(ends[0]);
  TlsSession session(std::make_shared<const TlsContext>(another_secret(), tls_options(false)),
                     Descriptor(ends[1]),
                     TlsSession::Start{.role = Role::kDialer, .peer = "victim", .host = "127.0.0.1"});
  session.shake_hands();
  Bytes bytes(16 << 10);
  const ssize_t got = ::recv(ours.get(), bytes.data(), bytes.size(), 0);
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return bytes;
}

TlsOptions AttackedListener::tls_options(bool ours) const {
  TlsOptions tls;
  if (!kind_.certificates) return tls;
  const auto& authority = ours ? *ours_ : *foreign_;
  tls.certificate_file = authority.certificate_file("worker");
  tls.key_file = authority.key_file("worker");
  tls.authority_file = authority.authority_file();
  return tls;
}

std::unique_ptr<Transport> AttackedListener::make_transport(Handler& handler,
                                                            TransportOptions options) const {
  const bool ours = std::ranges::equal(options.secret.bytes(), common_secret().bytes());
  if (kind_.transport == "local") return make_local_transport(*executor_, handler, std::move(options));
  if (is_tls()) return make_tls_transport(*executor_, handler, std::move(options), tls_options(ours));
  return make_stream_transport(*executor_, handler, std::move(options));
}

std::string AttackedListener::other_address(const std::string& name) const {
  if (kind_.unix_socket) return "unix:" + folder_.path() + "/" + name;
  ports_.push_back(torchspan::testing::reserve_port());
  return (is_tls() ? "tls:127.0.0.1:" : "tcp:127.0.0.1:") + std::to_string(ports_.back().number());
}

std::unique_ptr<Honest> AttackedListener::make_honest(const std::string& address) {
  const std::string& to = address.empty() ? address_ : address;
  if (kind_.store) {
    try {
      return std::make_unique<HonestMember>(*this, to, "honest" + std::to_string(members_++));
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
      return nullptr;
    }
  }
  // A rejected peer connects again, as workers do.
  const Deadline deadline = executor_->deadline_in(kPatience);
  while (!deadline.passed(executor_->now())) {
    auto honest = std::make_unique<HonestPeer>(*this, to);
    if (honest->exchange()) return honest;
    executor_->sleep(std::chrono::milliseconds(20));
  }
  ADD_FAILURE() << "an honest peer was not let in";
  return nullptr;
}

}  // namespace torchspan::net::conformance
