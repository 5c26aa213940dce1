#include "checkpoint/remote_values.h"

#include <exception>
#include <functional>
#include <map>
#include <span>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/checkpoint/extension.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/state/source.h>

#include "checkpoint/files/directory.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/state/folder_reader.h"
#include "checkpoint/state/snapshot.h"
#include "core/api/throw_invalid.h"
#include "state/api/save_load.h"

namespace torchspan::checkpoint {
namespace {

std::map<std::string, std::vector<RemoteItem>> by_owner(const Worker& worker, const RemoteValues& values) {
  std::map<std::string, std::vector<RemoteItem>> items;
  for (const auto& [name, value] : values)
    items[worker.info(static_cast<int>(value->owner())).name].push_back({value, name});
  return items;
}

}  // namespace

Owners::~Owners() { release(); }

std::string Owners::owner_of(const RemoteValue& value) const {
  return worker_.info(static_cast<int>(value->owner())).name;
}

Listing Owners::list(const RemoteValues& values) const {
  std::vector<std::pair<std::string, Future<std::string>>> replies;
  for (auto& [owner, items] : by_owner(worker_, values))
    replies.emplace_back(owner, worker_.request(owner, ListTensors{std::move(items)}, deadline()));
  Listing all;
  for (const auto& [owner, reply] : replies) {
    const std::string text = reply.wait();
    for (ListedPart& part : decode_listing(std::as_bytes(std::span(text)))) {
      part.owner = owner;
      all.push_back(std::move(part));
    }
  }
  return all;
}

void Owners::snapshot(const RemoteValues& values, const SaveJob& job, std::size_t rank) {
  release();
  auto items = by_owner(worker_, values);
  std::vector<Future<Unit>> replies;
  std::exception_ptr failure;
  const auto attempt = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  const auto send = [&](const Plan::Share& share) {
    TakeSnapshot message;
    message.id = worker_.backend()->next_id();
    message.items = std::move(items[share.owner]);
    for (std::size_t i = 0; i < share.entries.size(); ++i) {
      message.names.push_back(job.listings[rank][share.parts[i]].name);
      message.keys.push_back(share.entries[i].name);
    }
    snapshots_[share.owner] = message.id;
    replies.push_back(worker_.request(share.owner, message, deadline()));
  };
  for (const Plan::Share& share : job.plan.shares) {
    if (share.rank == rank && !share.owner.empty()) attempt([&] { send(share); });
  }
  // Waits for all of them: a snapshot that is dropped before it is taken would stay on its owner.
  for (const Future<Unit>& reply : replies) attempt([&] { reply.wait(); });
  if (failure) std::rethrow_exception(failure);
}

void Owners::release() noexcept {
  for (const auto& [owner, id] : snapshots_) {
    try {
      static_cast<void>(worker_.request(owner, DropSnapshot{id}, deadline()));
    } catch (const std::exception&) {
      continue;  // the owner died or left, and its snapshot is lost
    }
  }
  snapshots_.clear();
}

Future<std::string> Owners::write(const Plan::Share& share, const std::string& path) {
  const auto snapshot = snapshots_.extract(share.owner);
  if (snapshot.empty()) {
    return make_failed_future<std::string>(std::make_exception_ptr(
        Error(ErrorKind::kInvalid, "worker '" + share.owner + "' has no snapshot to write")));
  }
  return worker_.request(share.owner, WriteSnapshot{snapshot.mapped(), path}, deadline());
}

void Owners::load(const std::string& folder, const std::string& name, const RemoteValue& value) const {
  LoadTensors message{folder, {{value, name}}};
  worker_.request(owner_of(value), message, deadline()).wait();
}

namespace {

rpc::ValuePtr value_of_item(const RemoteItem& item) {
  if (!item.value) throw_invalid("the RRef saved as '{}' is empty", item.name);
  return item.value->value(Deadline::never());  // ready: a handler runs when its references are
}

std::vector<state::ModuleTensor> tensors_of_module(rpc::Value& value, const std::string& name) {
  auto* module = value.object<torch::nn::Module>();
  if (module == nullptr) {
    throw_invalid("'{}' is a '{}'; a checkpoint saves RRefs of modules and tensors", name, value.type_name());
  }
  std::vector<state::ModuleTensor> all;
  state::append_module_tensors(all, *module, "");
  return all;
}

/// Whether the tensors belong to this snapshot alone, so that they need no copy.
bool is_private(rpc::Value& value) { return value.type() == typeid(state::StateDict); }

void add_value(StateWriter& writer, rpc::Value& value, const std::string& name) {
  writer.set_prefix(name);
  if (value.type() == typeid(at::Tensor)) {
    writer.add("", *static_cast<at::Tensor*>(value.address()));
  } else if (value.type() == typeid(state::StateDict)) {
    for (const auto& entry : *static_cast<state::StateDict*>(value.address()))
      writer.add(entry.key(), entry.value());
  } else {
    state::save_module_tensors(writer, tensors_of_module(value, name));
  }
}

void load_value(FolderReader& reader, rpc::Value& value, const std::string& name) {
  reader.set_prefix(name);
  if (value.type() == typeid(at::Tensor)) {
    reader.read_into("", *static_cast<at::Tensor*>(value.address()));
  } else {
    state::load_module_tensors(reader, tensors_of_module(value, name), {});
  }
}

std::string text_of_bytes(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

/// The snapshots that other workers took of this worker's values.
class CheckpointExtension::Impl {
 public:
  explicit Impl(std::weak_ptr<rpc::WorkerBackend> backend) : backend_(std::move(backend)) {}

  std::string list(const ListTensors& message) const {
    StateWriter writer;
    for (const RemoteItem& item : message.items) add_value(writer, *value_of_item(item), item.name);
    return text_of_bytes(encode_listing(listing_of(writer.tensors())));
  }

  void take(const TakeSnapshot& message) {
    if (message.names.size() != message.keys.size())
      throw_invalid("a snapshot has different numbers of names and keys");
    StateWriter writer;
    bool copies = false;
    for (const RemoteItem& item : message.items) {
      const rpc::ValuePtr value = value_of_item(item);
      copies = copies || !is_private(*value);
      add_value(writer, *value, item.name);
    }
    std::map<std::string, std::size_t> places;
    for (std::size_t i = 0; i < writer.tensors().size(); ++i) places.emplace(writer.tensors()[i].name, i);
    const Listing listing = listing_of(writer.tensors());
    auto taken = std::make_shared<Taken>();
    for (std::size_t i = 0; i < message.names.size(); ++i) {
      const auto place = places.find(message.names[i]);
      if (place == places.end())
        throw_invalid("the tensor '{}' was listed and no longer exists", message.names[i]);
      const ListedPart& part = listing[place->second];
      taken->share.parts.push_back(place->second);
      taken->share.entries.push_back({message.keys[i], part.type, part.box.size});
    }
    taken->share.entries = encode_header(std::move(taken->share.entries), {}).header.entries;
    if (copies) {
      taken->snapshot.copy(writer.tensors(), taken->share);
    } else {
      taken->snapshot.borrow(writer.tensors(), taken->share);
    }
    const auto backend = backend_.lock();
    MutexLock lock(mutex_);  // before the question: depart() comes after the worker is marked absent
    if (!backend || !backend->is_present(message.id.worker))
      throw Error(ErrorKind::kDisconnected, "the worker that saves this checkpoint has died or left");
    taken_[message.id] = std::move(taken);
  }

  std::string write(const WriteSnapshot& message) {
    const std::shared_ptr<Taken> taken = extract(message.id);
    if (!taken) throw_invalid("the snapshot to write does not exist on this worker");
    const Disk disk;
    const WrittenFile written = write_tensor_file(disk, message.path, taken->share.entries,
                                                  taken->snapshot.data(), {{"format", "pt"}});
    disk.sync_folder(parent_of(message.path));
    return text_of_bytes(encode_report(
        {{written.bytes, written.header.data_start, written.head_checksum}, written.checksums}));
  }

  void drop(const DropSnapshot& message) { extract(message.id); }

  void load(const LoadTensors& message) const {
    const Disk disk;
    FolderReader reader(message.folder, open_manifest(disk, message.folder));
    for (const RemoteItem& item : message.items) load_value(reader, *value_of_item(item), item.name);
  }

  void depart(std::uint32_t rank) {
    std::vector<std::shared_ptr<Taken>> gone;  // destroyed without the lock
    MutexLock lock(mutex_);
    for (auto it = taken_.begin(); it != taken_.end();) {
      if (it->first.worker != rank) {
        ++it;
        continue;
      }
      gone.push_back(std::move(it->second));
      it = taken_.erase(it);
    }
  }

  std::size_t count() const {
    MutexLock lock(mutex_);
    return taken_.size();
  }

 private:
  struct Taken {
    Plan::Share share;
    Snapshot snapshot;
  };

  std::shared_ptr<Taken> extract(const GlobalId& id) {
    MutexLock lock(mutex_);
    auto node = taken_.extract(id);
    return node.empty() ? nullptr : std::move(node.mapped());
  }

  const std::weak_ptr<rpc::WorkerBackend> backend_;
  mutable Mutex mutex_;
  std::map<GlobalId, std::shared_ptr<Taken>> taken_ TORCHSPAN_GUARDED_BY(mutex_);
};

CheckpointExtension::CheckpointExtension() = default;
CheckpointExtension::~CheckpointExtension() = default;

void CheckpointExtension::attach(rpc::Registrar& registrar) {
  impl_ = std::make_shared<Impl>(registrar.worker().backend()->weak_from_this());
  using rpc::RunOn;
  registrar.handle<ListTensors>(
      RunOn::kPool, [impl = impl_](const rpc::CallInfo&, const ListTensors& m) { return impl->list(m); });
  registrar.handle<TakeSnapshot>(RunOn::kPool, [impl = impl_](const rpc::CallInfo&, const TakeSnapshot& m) {
    impl->take(m);
    return Unit();
  });
  registrar.handle<WriteSnapshot>(
      RunOn::kPool, [impl = impl_](const rpc::CallInfo&, const WriteSnapshot& m) { return impl->write(m); });
  registrar.handle<DropSnapshot>(RunOn::kPool, [impl = impl_](const rpc::CallInfo&, const DropSnapshot& m) {
    impl->drop(m);
    return Unit();
  });
  registrar.handle<LoadTensors>(RunOn::kPool, [impl = impl_](const rpc::CallInfo&, const LoadTensors& m) {
    impl->load(m);
    return Unit();
  });
  registrar.on_departure([impl = impl_](std::uint32_t rank, const Error&) { impl->depart(rank); });
}

std::size_t CheckpointExtension::snapshots() const { return impl_->count(); }

}  // namespace torchspan::checkpoint
