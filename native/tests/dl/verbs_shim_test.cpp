// The hardware backing through the real path (dlopen, versioned symbols, the libraries' structs and ways to fail), over the shim and a scripted driver; and every
// reason of the probe.
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "check.hpp"
#include "core/ibgda/probe.hpp"
#include "core/ibgda/queues.hpp"
#include "dl/shim/attach.hpp"
#include "../ibgda/fake_sysfs.hpp"
#include "../ibgda/scripted_nic.hpp"

namespace {

using namespace ep::ibgda;
using namespace ep::test;

const ep::dl::verbs_libraries shim{EP_VERBS_SHIM, EP_VERBS_SHIM};

bool says(const std::string& message, const std::string& part) {
  const bool found = message.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "  '%s' does not say '%s'\n", message.c_str(), part.c_str());
  return found;
}
ep::failure fine() { return {EP_STATUS_OK, 0, ""}; }
ep::failure failing(int error) { return {EP_STATUS_SYSTEM, error, "scripted"}; }

// What a test sees of the device: through the shim, the libraries' conventions are in between.
struct world {
  nic_script script;
  scripted_driver below{script};
  std::unique_ptr<ep::dl::mlx5_driver> above;
  world() {
    EP_CHECK(ep::dl::verbs_shim_attach(EP_VERBS_SHIM, &below).ok());
    auto opened = ep::dl::mlx5_verbs_driver(shim);
    EP_CHECK(opened.ok());
    above = std::move(opened.value());
  }
  ~world() { EP_CHECK(ep::dl::verbs_shim_attach(EP_VERBS_SHIM, nullptr).ok()); }
};

// The same queue pairs made and connected: what reaches the NIC is the same, byte for byte, packet numbers (random) excepted.
std::vector<std::vector<uint8_t>> commands_of(ep::dl::mlx5_driver& driver, nic_script& script) {
  const auto host = host_control_memory();
  control_memory* const sources[] = {host.get()};
  queue_options options;
  options.qps_per_peer = 3;
  options.depth = 64;
  auto port = device_open(driver, {});
  EP_CHECK(port.ok());
  auto made = rank_queues::create(std::move(port.value()), options, sources);
  EP_CHECK(made.ok());
  if (!made.ok()) std::fprintf(stderr, "  %s\n", made.why().message.c_str());
  EP_CHECK(made.value()->connect(std::vector<std::vector<uint8_t>>{made.value()->connection()}).ok());
  EP_CHECK_EQ(made.value()->state(1).value(), uint32_t{EP_MLX5_QP_STATE_RTS});
  EP_CHECK(made.value()->register_memory({0x10000, 0x1000}, ep::dl::MLX5_ACCESS_LOCAL_WRITE).ok());
  EP_CHECK(made.value()->close().ok());
  EP_CHECK(script.alive.empty());
  auto commands = script.commands;
  for (auto& command : commands) {
    const uint64_t opcode = prm_get(command, EP_MLX5_CMD_IN_OPCODE);
    const auto qpc = [&] { return std::span(command).subspan(EP_MLX5_QPC_AT); };
    if (opcode == EP_MLX5_CMD_INIT2RTR_QP) prm_set(qpc(), EP_MLX5_QPC_NEXT_RCV_PSN, 0);
    if (opcode == EP_MLX5_CMD_RTR2RTS_QP) prm_set(qpc(), EP_MLX5_QPC_NEXT_SEND_PSN, 0);
  }
  return commands;
}

void sends_the_same_commands() {
  for (const bool ethernet : {true, false}) {
    nic_script direct_script;
    direct_script.devices = {{"mlx5_0", {ethernet ? ethernet_port() : infiniband_port()}}};
    scripted_driver direct(direct_script);
    const auto expected = commands_of(direct, direct_script);
    world through;
    through.script.devices = direct_script.devices;
    const auto found = commands_of(*through.above, through.script);
    EP_CHECK_EQ(expected.size(), found.size());
    EP_CHECK(expected == found);
    EP_CHECK_EQ(direct_script.routes.size(), through.script.routes.size());
    EP_CHECK(direct_script.routes[0].dgid == through.script.routes[0].dgid || !ethernet);
    EP_CHECK_EQ(int{direct_script.routes[0].hop_limit}, int{through.script.routes[0].hop_limit});
  }
}

// Errors arrive as the table promises them, whatever the libraries make of them on the way.
void translates_failures() {
  world through;
  std::string failing_call;
  int error = 0;
  through.script.fails = [&](const std::string& call, int) { return call == failing_call ? failing(error) : fine(); };
  auto opened = through.above->open("mlx5_0");
  EP_CHECK(opened.ok());
  ep::dl::mlx5_device& device = *opened.value();
  const auto pd = device.alloc_pd();
  EP_CHECK_EQ(const_cast<ep::result<ep::dl::mlx5_pd>&>(pd).value().pdn, 0x0abcu);
  const ep::dl::mlx5_pd domain = const_cast<ep::result<ep::dl::mlx5_pd>&>(pd).value();
  const auto expect = [&](const char* call, int scripted, int expected, auto made, const char* text = "") {
    failing_call = call;
    error = scripted;
    auto done = made();
    failing_call.clear();
    EP_CHECK(!done.ok());
    if (done.ok()) return;
    EP_CHECK_EQ(done.why().sys_errno, expected);
    EP_CHECK_EQ(done.why().status, uint32_t{EP_STATUS_SYSTEM});
    EP_CHECK(says(done.why().message, "mlx5_0"));
    EP_CHECK(says(done.why().message, text));
  };
  alignas(64) static uint8_t bytes[64];
  const ep::dl::mlx5_memory memory{reinterpret_cast<uint64_t>(bytes), sizeof bytes};
  const ep::dl::mlx5_memory dmabuf{0, 4096, 7, 4096};
  std::array<uint8_t, 16> out{};
  expect("reg_mr", EFAULT, EFAULT, [&] { return device.reg_mr(domain, memory, 1); }, "nvidia-peermem");
  expect("reg_mr", ENOMEM, ENOMEM, [&] { return device.reg_mr(domain, memory, 1); }, "RLIMIT_MEMLOCK");
  expect("reg_mr", EOPNOTSUPP, EOPNOTSUPP, [&] { return device.reg_mr(domain, dmabuf, 1); }, "ibv_reg_dmabuf_mr");
  expect("umem_reg", EOPNOTSUPP, EOPNOTSUPP, [&] { return device.umem_reg(dmabuf, 1); });
  expect("alloc_uar noncached", EOPNOTSUPP, EOPNOTSUPP, [&] { return device.alloc_uar(ep::dl::mlx5_uar_kind::noncached); }, "non-cached");
  expect("alloc_uar", ENOMEM, ENOMEM, [&] { return device.alloc_uar(ep::dl::mlx5_uar_kind::blueflame); });
  expect("resolve_ah", EHOSTUNREACH, EHOSTUNREACH, [&] { return device.resolve_ah(domain, {}); }, "gid index 0");
  expect("query_port", EINVAL, EINVAL, [&] { return device.query_port(1); });
  expect("query_eqn", EINVAL, EINVAL, [&] { return device.query_eqn(1); });
  // Kernels make error numbers of the NIC's status; the status is what counts, and it comes along.
  queue_command command = cq_create_command({});
  expect("CREATE_CQ", EINVAL, EREMOTEIO, [&] { return device.obj_create(command, out); }, "command 0x400");
  EP_CHECK_EQ(command_answer_text(out), "status 0x3 (bad parameter), syndrome 0x0012ab34");
  auto object = device.obj_create(command, out);
  EP_CHECK(object.ok());
  auto busy = device.close();
  EP_CHECK(!busy.ok() && busy.why().sys_errno == EBUSY);
  if (!busy.ok()) EP_CHECK(says(busy.why().message, "2 objects"));
  EP_CHECK(device.obj_destroy(object.value()).ok());
  EP_CHECK(device.dealloc_pd(domain).ok());
  EP_CHECK(device.close().ok());
  auto other = through.above->open("mlx5_7");
  EP_CHECK(!other.ok() && other.why().sys_errno == ENODEV);
}

void brings_events() {
  world through;
  auto opened = through.above->open("mlx5_0");
  EP_CHECK(opened.ok());
  ep::dl::mlx5_device& device = *opened.value();
  std::array<uint8_t, 16> out{};
  auto queue = device.obj_create(qp_create_command({}), out);
  EP_CHECK(queue.ok());
  const auto qpn = static_cast<uint32_t>(prm_get(out, EP_MLX5_CMD_OUT_OBJECT));
  ep::dl::mlx5_event event;
  EP_CHECK(!device.poll_async(event).value());
  using enum ep::dl::mlx5_event_kind;
  through.script.events = {{port_down, 1, 0, 0}, {qp_error, 0, qpn, 0}, {gid_change, 2, 0, 0}};
  EP_CHECK(device.poll_async(event).value());
  EP_CHECK(event.kind == qp_error && event.number == qpn);
  EP_CHECK(device.poll_async(event).value());
  EP_CHECK(event.kind == port_down && event.port == 1);
  EP_CHECK(device.poll_async(event).value());
  EP_CHECK(event.kind == gid_change && event.port == 2);
  EP_CHECK(!device.poll_async(event).value());
  EP_CHECK(device.obj_destroy(queue.value()).ok());
  EP_CHECK(device.close().ok());
}

void names_what_is_missing() {
  const auto expect = [](const probe_report& report, missing what, const char* part) {
    EP_CHECK_EQ(report.what, what);
    EP_CHECK(says(report.reason, part));
    EP_CHECK(report.remedy.empty() == (what == missing::other));
  };
  expect(probe_hardware({"libep-no-such-library.so.1", EP_VERBS_SHIM}, {}), missing::library, "libep-no-such-library.so.1");
  expect(probe_hardware({EP_VERBS_SHIM, "libep-no-such-library.so.1"}, {}), missing::library, "libep-no-such-library.so.1");
  // Libraries that are there, and other ones.
  const probe_report other = probe_hardware({"libm.so.6", EP_VERBS_SHIM}, {});
  expect(other, missing::symbol, "libm.so.6 lacks ibv_get_device_list@IBVERBS_1.1");
  EP_CHECK(says(other.reason, "_ibv_query_gid_ex@IBVERBS_1.11"));
  EP_CHECK(other.reason.find("ibv_reg_dmabuf_mr") == std::string::npos); // not required
  expect(probe_hardware({EP_VERBS_SHIM, "libm.so.6"}, {}), missing::symbol, "mlx5dv_devx_obj_create@MLX5_1.7");

  // What helps depends on the backing: plain verbs need no DevX, and any device will do.
  const auto without = [](int error) { return probe_without_driver("verbs", {EP_STATUS_SYSTEM, error, "why"}); };
  EP_CHECK(says(without(ELIBACC).remedy, "libibverbs1"));
  EP_CHECK_EQ(without(ELIBACC).what, missing::library);
  EP_CHECK_EQ(without(ELIBBAD).what, missing::symbol);
  EP_CHECK(says(without(ENODEV).remedy, "rdma link add"));
  EP_CHECK(without(EACCES).remedy.find("CAP_NET_RAW") == std::string::npos);

  EP_CHECK(ep::dl::verbs_shim_attach(EP_VERBS_SHIM, nullptr).ok());
  expect(probe_hardware(shim, {}), missing::kernel, "ib_uverbs is not loaded");

  world through;
  nic_script& script = through.script;
  script.devices.clear();
  expect(probe_hardware(shim, {}), missing::device, "hardware sees none");
  script.devices = {{"irdma0", {ethernet_port()}}};
  script.unsupported = {{"irdma0", "?"}};
  expect(probe_hardware(shim, {}), missing::device, "irdma0: not an mlx5 device");

  script.devices["mlx5_0"] = {ethernet_port()};
  probe_wish filtered;
  filtered.device.filter = "mlx5_9";
  expect(probe_hardware(shim, filtered), missing::device, "mlx5_0: not in the device filter 'mlx5_9'");
  filtered.device.filter = "mlx5_0:";
  expect(probe_hardware(shim, filtered), missing::other, "device filter 'mlx5_0:'");

  script.fails = [](const std::string& call, int) { return call == "open mlx5_0" ? failing(EPERM) : fine(); };
  expect(probe_hardware(shim, {}), missing::devx, "it opens, but not for DevX");
  script.fails = [](const std::string& call, int) { return call == "open mlx5_0" ? failing(EACCES) : fine(); };
  expect(probe_hardware(shim, {}), missing::devx, "uverbs");
  script.fails = [](const std::string& call, int) { return call == "open mlx5_0" ? failing(EIO) : fine(); };
  expect(probe_hardware(shim, {}), missing::other, "ibv_open_device failed");
  script.fails = [](const std::string&, int) { return fine(); };

  scripted_port& port = script.devices["mlx5_0"][0];
  port.facts.state = ep::dl::mlx5_port_state::down;
  expect(probe_hardware(shim, {}), missing::port, "mlx5_0: port 1 is down");
  port = ethernet_port();
  probe_wish infiniband;
  infiniband.device.link = ep::dl::mlx5_link::infiniband;
  expect(probe_hardware(shim, infiniband), missing::link, "port 1 is Ethernet, InfiniBand was asked for");
  port.gids.resize(1);
  expect(probe_hardware(shim, {}), missing::gid, "0: RoCE v1");
  port = ethernet_port();

  const fake_sysfs sys;
  two_sockets(sys);
  probe_wish gpu;
  gpu.gpu = true;
  gpu.device.sysfs = sys.root();
  gpu.device.near = topology_read(sys.root()).gpus[0].place;
  const probe_report unreachable = probe_hardware(shim, gpu);
  expect(unreachable, missing::gpudirect, "nobody could say whether this GPU exports DMA-BUFs, and the kernel module nvidia-peermem is not loaded");
  EP_CHECK_EQ(unreachable.device, "mlx5_0");
  gpu.gpu_dmabuf = false;
  expect(probe_hardware(shim, gpu), missing::gpudirect, "exports no DMA-BUFs");
  sys.module("nvidia_peermem");
  const probe_report reachable = probe_hardware(shim, gpu);
  EP_CHECK_EQ(reachable.what, missing::nothing);
  EP_CHECK_EQ(reachable.far, distance::switched);
  EP_CHECK_EQ(reachable.gid.index, 3u);
  EP_CHECK_EQ(reachable.placements.size(), size_t{3});
  EP_CHECK(!reachable.placements[0].possible && reachable.placements[1].possible && reachable.placements[2].possible);
  EP_CHECK(reachable.reason.empty() && reachable.remedy.empty());
  EP_CHECK(script.alive.empty());
}

// Whatever this machine has: the probe ends, and says something.
void probes_this_machine() {
  const probe_report report = probe_hardware({}, {});
  std::printf("this machine: %s%s%s\n", missing_name(report.what), report.reason.empty() ? "" : ": ", report.reason.c_str());
  EP_CHECK((report.what == missing::nothing) == report.reason.empty());
}

} // namespace

int main() {
  sends_the_same_commands();
  translates_failures();
  brings_events();
  names_what_is_missing();
  probes_this_machine();
  return ep::check::finish();
}
