#include "python/c10d/world.h"

#include "python/gil.h"

namespace torchspan::python {

std::shared_ptr<World> World::join(c10d::Store& store, const Place& place, Duration timeout) {
  const auto end = [process = OwnerProcess()](World* world) {
    if (!process.is_current()) return keep_until_exit(world);
    without_gil([world] { delete world; });
  };
  return {new World(store, place, timeout), end};
}

World::World(c10d::Store& store, const Place& place, Duration timeout) {
  Job job(&store, place, timeout);
  runtime_ = job.runtime();
  membership_ = job.join();
  callbacks_ = std::make_shared<Pool>(runtime_->executor, PoolOptions{.name = "callbacks", .threads = 1});
  observation_ = job.observe(membership_->self().name);
}

World::~World() { callbacks_->stop(); }

void World::post(UniqueFunction<void()> job) {
  callbacks_->post([pool = callbacks_.get(), job = std::move(job)]() mutable {
    const Pool::BlockingScope may_block(*pool);
    job();
  });
}

collective::Group World::make_group(collective::GroupOptions options) {
  return collective::Group::make(runtime_, *membership_, std::move(options));
}

void World::leave(Duration timeout) {
  runtime_->check_process();  // others would see the parent leave
  membership_->leave(runtime_->executor.deadline_in(timeout));
}

}  // namespace torchspan::python
