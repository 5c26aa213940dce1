#include "launch/supervisor/open_files.h"

namespace torchspan::launch {

RaisedOpenFiles::RaisedOpenFiles() {
  if (getrlimit(RLIMIT_NOFILE, &before_) != 0 || before_.rlim_cur == before_.rlim_max) return;
  const rlimit most{before_.rlim_max, before_.rlim_max};
  raised_ = setrlimit(RLIMIT_NOFILE, &most) == 0;
}

RaisedOpenFiles::~RaisedOpenFiles() {
  if (raised_) setrlimit(RLIMIT_NOFILE, &before_);
}

}  // namespace torchspan::launch
