#include "launch/supervisor/worker.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <torchspan/core/error.h>

namespace torchspan::launch {

Worker::Worker(WorkerNames names, Child child, Display& display, Poller& poller)
    : names_(std::move(names)), child_(std::move(child)), display_(display), poller_(poller) {
  if (!names_.log_folder.empty()) {
    output_log_ = open_log("out");
    errors_log_ = open_log("err");
  }
  poller_.add(child_.process_descriptor(), token_of(Source::kEnd, names_.index), false);
  poller_.add(child_.output().get(), token_of(Source::kOutput, names_.index), false);
  poller_.add(child_.errors().get(), token_of(Source::kErrors, names_.index), false);
  poller_.add(child_.progress().get(), token_of(Source::kProgress, names_.index), false);
}

Worker::~Worker() {
  close_streams();
  if (!ended_) poller_.remove(child_.process_descriptor());
}

Descriptor Worker::open_log(const char* kind) const {
  const std::string path = fmt::format("{}/{}.{}.log", names_.log_folder, names_.name, kind);
  const int start = names_.append ? O_APPEND : O_TRUNC;
  Descriptor log(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | start, 0644));
  if (!log) throw_invalid(fmt::format("log '{}' cannot be written: {}", path, std::strerror(errno)));
  return log;
}

void Worker::set_ended() {
  ended_ = true;
  poller_.remove(child_.process_descriptor());
  child_.close_process_descriptor();
}

bool Worker::silent() const { return !child_.output() && !child_.errors(); }

void Worker::write_log(Descriptor& log, std::string_view text) {
  while (log && !text.empty()) {
    const auto written = write(log.get(), text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      display_.note_lost_log(
          fmt::format("a log in '{}' is not complete: {}", names_.log_folder, std::strerror(errno)));
      log.reset();
    }
  }
}

void Worker::read_into(Descriptor& descriptor, Descriptor& log, LineSplitter& lines,
                       const LineSplitter::Take& take) {
  std::array<char, 65536> bytes;
  if (!descriptor) return;
  const auto got = read(descriptor.get(), bytes.data(), bytes.size());
  if (got > 0) {
    const std::string_view text(bytes.data(), static_cast<std::size_t>(got));
    write_log(log, text);
    lines.feed(text, take);
  } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
    lines.finish(take);
    poller_.remove(descriptor.get());
    descriptor.reset();
    log.reset();
  }
}

void Worker::read_output() {
  read_into(child_.output(), output_log_, output_,
            [this](std::string_view line) { display_.print_output(names_.prefix, line); });
}

void Worker::read_errors() {
  read_into(child_.errors(), errors_log_, errors_, [this](std::string_view line) {
    display_.print_error(names_.prefix, line);
    words_.add(line);
    recent_.add(line);
  });
}

void Worker::read_progress(const LineSplitter::Take& take) {
  Descriptor no_log;
  read_into(child_.progress(), no_log, progress_, take);
}

void Worker::close_streams() {
  for (auto* stream : {&child_.output(), &child_.errors(), &child_.progress()}) {
    if (*stream) poller_.remove(stream->get());
    stream->reset();
  }
  output_log_.reset();
  errors_log_.reset();
}

}  // namespace torchspan::launch
