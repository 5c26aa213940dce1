#include "bench/rpc/rows.h"

#include <ATen/ATen.h>

namespace torchspan::bench {
namespace {

struct Size {
  const char* name;
  std::int64_t bytes;
  int repeats;
};
constexpr Size kSizes[] = {{"4KiB", 1 << 12, 1000}, {"64KiB", 1 << 16, 500}, {"1MiB", 1 << 20, 200},
                           {"16MiB", 16 << 20, 30}, {"64MiB", 64 << 20, 12}, {"256MiB", 256 << 20, 6}};

/// Changes the first and the last element with every call, so that an old result is detected.
at::Tensor& touched(at::Tensor& x, float& mark) {
  mark += 1;
  x.data_ptr<float>()[0] = mark;
  x.data_ptr<float>()[x.numel() - 1] = mark;
  return x;
}

std::vector<Row> small_rows(Way way, const std::string& suffix) {
  std::vector<Row> rows;
  const std::string ping = way == Way::kLocal ? "limit/ring_ping" : "limit/socket_ping";
  rows.push_back({"rpc/small_call" + suffix, way, 2,
                  [](Side& side, const Meter& meter) {
                    std::int64_t n = 0;
                    return meter.times(2000, [&] { side.small_call(++n); });
                  },
                  ping});
  rows.push_back({"rpc/add_64B" + suffix, way, 2,
                  [](Side& side, const Meter& meter) {
                    at::Tensor x = at::ones({16});
                    float mark = 0;
                    return meter.times(2000, [&] { side.add(touched(x, mark)); });
                  },
                  ping});
  rows.push_back({"rpc/in_flight_64" + suffix, way, 2, [](Side& side, const Meter& meter) {
                    return meter.times(
                        20, [&] { side.in_flight_64(1024); }, 1024);
                  }});
  return rows;
}

std::vector<Row> bulk_rows(Way way, const std::string& suffix) {
  std::vector<Row> rows;
  for (const bool both : {false, true}) {
    for (const Size& size : kSizes) {
      rows.push_back({(both ? "rpc/echo/" : "rpc/one_way/") + std::string(size.name) + suffix, way, 2,
                      [=](Side& side, const Meter& meter) {
                        at::Tensor x = at::rand({size.bytes / 4});
                        float mark = 0;
                        return meter.times(size.repeats, [&] {
                          both ? side.echo(touched(x, mark)) : side.one_way(touched(x, mark));
                        });
                      },
                      way == Way::kHosts ? "limit/encryption/" + std::string(size.name)
                                         : "limit/memcpy/" + std::string(size.name),
                      both ? 2.0 : 1.0});
    }
  }
  return rows;
}

}  // namespace

std::vector<Row> rpc_rows() {
  std::vector<Row> rows;
  auto append = [&](std::vector<Row> more) { rows.insert(rows.end(), more.begin(), more.end()); };
  append(small_rows(Way::kLocal, "/local"));
  append({{"rpc/remote_use/local", Way::kLocal, 2,
           [](Side& side, const Meter& meter) {
             at::Tensor x = at::ones({16});
             float mark = 0;
             return meter.times(1000, [&] { side.remote_use(touched(x, mark)); });
           },
           "limit/ring_ping"}});
  append(bulk_rows(Way::kLocal, "/local"));
  append({{"rpc/fan_out_3/local", Way::kLocal, 4,
           [](Side& side, const Meter& meter) {
             std::int64_t n = 0;
             return meter.times(500, [&] { side.fan_out_3(++n); });
           },
           "limit/ring_ping"}});
  append(small_rows(Way::kHosts, "/tls"));
  append(bulk_rows(Way::kHosts, "/tls"));
  append(small_rows(Way::kPlain, "/plain"));
  append(bulk_rows(Way::kPlain, "/plain"));
  append({{"rpc/idle_cpu", Way::kLocal, 2,
           [](Side& side, const Meter& meter) {
             side.small_call(1);
             return std::vector<double>{meter.idle_cpu()};
           },
           "", 1, "percent"}});
  return rows;
}

}  // namespace torchspan::bench
