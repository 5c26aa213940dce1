#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/rendezvous.h>

#include "rendezvous/environment/slurm.h"

namespace torchspan::rendezvous::environment_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The error text of read_environment(), or an empty text.
std::string error_text(const Environment& environment) {
  try {
    read_environment(environment);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    return error.message();
  }
  return "";
}

Environment torchrun() {
  return {{"RANK", "3"},
          {"WORLD_SIZE", "4"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "node7"},
          {"MASTER_PORT", "29400"},
          {"TORCHELASTIC_RUN_ID", "run5"},
          {"HOME", "/home"}};
}

Environment with(Environment environment, const Environment& more) {
  for (const auto& [name, value] : more) environment[name] = value;
  return environment;
}

TEST(Environment, IsAWorldOfOneWhenNothingIsSet) {
  const WorkerEnvironment worker = read_environment({});
  EXPECT_EQ(worker.name, "worker0");
  EXPECT_EQ(worker.rank, 0);
  EXPECT_EQ(worker.world_size, 1);
  EXPECT_EQ(worker.local_rank, 0);
  EXPECT_EQ(worker.local_world_size, 1);
  EXPECT_EQ(worker.launcher, Launcher::kNone);
  EXPECT_EQ(worker.store_address(), "tcp:127.0.0.1:29500");
  EXPECT_EQ(worker.secret_file, "");
  EXPECT_EQ(worker.restart_count, 0);
}

// peer: rpc_test.py dynamic_rpc_init_rpc_without_rank
TEST(Environment, ReadsAnOpenWorld) {
  const Environment base{{"WORLD_SIZE", "0"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1234"}};
  const WorkerEnvironment first = read_environment(with(base, {{"RANK", "0"}}));
  EXPECT_EQ(first.world_size, kOpenWorld);
  EXPECT_EQ(first.rank, 0);
  EXPECT_EQ(first.name, "worker0");
  EXPECT_TRUE(first.one_host());
  const WorkerEnvironment any = read_environment(with(base, {{"TORCHSPAN_NAME", "actor-a"}}));
  EXPECT_EQ(any.rank, kAnyRank);
  EXPECT_EQ(any.name, "actor-a");
  EXPECT_FALSE(read_environment(with(base, {{"RANK", "2"}, {"MASTER_ADDR", "node7"}})).one_host());
  EXPECT_THAT(error_text(base), AllOf(HasSubstr("RANK"), HasSubstr("TORCHSPAN_NAME")));
}

TEST(Environment, ReadsTorchrunsVariables) {
  const WorkerEnvironment worker = read_environment(with(torchrun(), {{"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_EQ(worker.launcher, Launcher::kExplicit);
  EXPECT_EQ(worker.rank, 3);
  EXPECT_EQ(worker.world_size, 4);
  EXPECT_EQ(worker.local_rank, 1);
  EXPECT_EQ(worker.local_world_size, 2);
  EXPECT_EQ(worker.name, "worker3");
  EXPECT_EQ(worker.store_address(), "tls:node7:29400");
  EXPECT_FALSE(worker.one_host());
  EXPECT_EQ(worker.restart_count, 2);
  EXPECT_EQ(worker.job, "run5");
}

TEST(Environment, HasOneJobIdForAgentsOfTorchrunThatCountRestartsDifferently) {
  const auto first = read_environment(with(torchrun(), {{"TORCHELASTIC_RESTART_COUNT", "1"}}));
  const auto second = read_environment(with(torchrun(), {{"TORCHELASTIC_RESTART_COUNT", "0"}}));
  EXPECT_EQ(first.job, second.job);
  EXPECT_EQ(first.restart_count, 1);
  EXPECT_NE(read_environment(with(torchrun(), {{"TORCHELASTIC_RUN_ID", "run6"}})).job, first.job);
}

TEST(Environment, TakesTheNextPortWhenTorchrunsAgentOwnsTheFirst) {
  EXPECT_EQ(read_environment(with(torchrun(), {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).master_port,
            29401);
  EXPECT_EQ(read_environment(with(torchrun(), {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).master_port,
            29400);
  EXPECT_THAT(
      error_text(with(torchrun(), {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"MASTER_PORT", "65535"}})),
      HasSubstr("MASTER_PORT is 65535"));
}

TEST(Environment, UsesLoopbackWhenAllWorkersAreOnOneHost) {
  const auto worker = read_environment(with(torchrun(), {{"LOCAL_WORLD_SIZE", "4"}, {"LOCAL_RANK", "3"}}));
  EXPECT_EQ(worker.store_address(), "tcp:127.0.0.1:29400");
  const auto by_hand = read_environment(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1234"}});
  EXPECT_EQ(by_hand.store_address(), "tcp:127.0.0.1:1234");
  EXPECT_EQ(by_hand.local_world_size, 2);
  EXPECT_EQ(by_hand.local_rank, 1);
}

TEST(Environment, UsesTlsBetweenHosts) {
  const auto at = [](const std::string& host) {
    return read_environment(with(torchrun(), {{"MASTER_ADDR", host}})).store_address();
  };
  EXPECT_EQ(at("10.0.0.7"), "tls:10.0.0.7:29400");
  EXPECT_EQ(at("2001:db8::7"), "tls:[2001:db8::7]:29400");
  EXPECT_EQ(at("[2001:db8::7]"), "tls:[2001:db8::7]:29400");
}

TEST(Environment, ReadsTheListenAddressAndTheCertificates) {
  const Environment all = {{"TORCHSPAN_LISTEN_HOST", "10.0.0.7"},
                           {"TORCHSPAN_CERTIFICATE_FILE", "c.pem"},
                           {"TORCHSPAN_KEY_FILE", "k.pem"},
                           {"TORCHSPAN_AUTHORITY_FILE", "a.pem"}};
  const auto worker = read_environment(with(torchrun(), all));
  EXPECT_EQ(worker.listen_host, "10.0.0.7");
  EXPECT_EQ(worker.certificate_file + worker.key_file + worker.authority_file, "c.pemk.pema.pem");
  for (const auto& [name, value] : all) {
    if (name == "TORCHSPAN_LISTEN_HOST") continue;
    EXPECT_THAT(error_text(with(torchrun(), {{name, value}})), HasSubstr(name + " is set but"));
  }
}

TEST(Environment, AssumesOneWorkerPerHostUnderAForeignMasterWithoutLocalVariables) {
  const auto worker = read_environment(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "1234"}});
  EXPECT_EQ(worker.local_world_size, 1);
  EXPECT_EQ(worker.local_rank, 0);
  EXPECT_EQ(worker.store_address(), "tls:node1:1234");
}

TEST(Environment, ReadsOpenMpisVariables) {
  const Environment mpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  const auto worker = read_environment(mpi);
  EXPECT_EQ(worker.launcher, Launcher::kOpenMpi);
  EXPECT_EQ(worker.rank, 1);
  EXPECT_EQ(worker.world_size, 2);
  EXPECT_EQ(worker.local_rank, 1);
  EXPECT_EQ(worker.store_address(), "tcp:127.0.0.1:29500");
  const auto spaced = read_environment(with(mpi, {{"PMIX_NAMESPACE", "1234567"}}));
  EXPECT_EQ(spaced.job, "1234567");
  EXPECT_GE(spaced.master_port, 20000);
  EXPECT_LT(spaced.master_port, 30000);
  EXPECT_THAT(
      error_text(with(mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})),
      AllOf(HasSubstr("MASTER_ADDR is not set"), HasSubstr("mpirun -x")));
}

TEST(Environment, ReadsBothSpellingsOfPmi) {
  const Environment mpich = {
      {"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"PMI_LOCAL_RANK", "0"}, {"MASTER_ADDR", "node1"}};
  EXPECT_EQ(read_environment(mpich).launcher, Launcher::kPmi);
  EXPECT_EQ(read_environment(mpich).rank, 2);
  const auto intel = read_environment(
      {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "4"}});
  EXPECT_EQ(intel.local_rank, 2);
  EXPECT_TRUE(intel.one_host());
}

/// A task of `srun --mpi=pmi2`, with four tasks on each of two nodes.
Environment pmi2_task() {
  return {{"PMI_RANK", "5"},
          {"PMI_SIZE", "8"},
          {"PMI_JOBID", "77.0"},
          {"SLURM_PROCID", "5"},
          {"SLURM_NTASKS", "8"},
          {"SLURM_STEP_NUM_TASKS", "8"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_NODEID", "1"},
          {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
          {"SLURM_STEP_NODELIST", "gpu[03-04]"},
          {"SLURM_JOB_ID", "77"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_JOB_NAME", "train"}};
}

TEST(Environment, ReadsLocalRanksAndHostsOfSlurmWithItsPmi2Plugin) {
  const auto worker = read_environment(pmi2_task());
  EXPECT_EQ(worker.launcher, Launcher::kSlurm);
  EXPECT_EQ(worker.rank, 5);
  EXPECT_EQ(worker.world_size, 8);
  EXPECT_EQ(worker.local_rank, 1);
  EXPECT_EQ(worker.local_world_size, 4);
  EXPECT_EQ(worker.master_host, "gpu03");
}

TEST(Environment, ReadsPmiInsideASlurmStepOfAnotherLauncher) {
  // mpiexec of MPICH starts its proxies with srun: one task per node.
  const Environment hydra = with(pmi2_task(), {{"SLURM_PROCID", "1"},
                                               {"SLURM_STEP_NUM_TASKS", "2"},
                                               {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                                               {"MASTER_ADDR", "gpu03"}});
  EXPECT_EQ(read_environment(hydra).launcher, Launcher::kPmi);
  EXPECT_EQ(read_environment(with(hydra, {{"PMI_RANK", "1"}})).launcher, Launcher::kPmi);
  const auto local =
      read_environment(with(pmi2_task(), {{"MPI_LOCALRANKID", "3"}, {"MPI_LOCALNRANKS", "8"}}));
  EXPECT_EQ(local.launcher, Launcher::kPmi);
  EXPECT_EQ(local.local_rank, 3);
}

TEST(Environment, ReadsSlurmsVariables) {
  const auto worker = read_environment({{"SLURM_PROCID", "4"},
                                        {"SLURM_NTASKS", "6"},
                                        {"SLURM_LOCALID", "1"},
                                        {"SLURM_NODEID", "1"},
                                        {"SLURM_TASKS_PER_NODE", "3(x2)"},
                                        {"SLURM_JOB_ID", "1234567"},
                                        {"SLURM_STEP_ID", "2"},
                                        {"SLURM_JOB_NAME", "train"},
                                        {"SLURM_JOB_NODELIST", "gpu[03-05,9],login1"}});
  EXPECT_EQ(worker.launcher, Launcher::kSlurm);
  EXPECT_EQ(worker.rank, 4);
  EXPECT_EQ(worker.world_size, 6);
  EXPECT_EQ(worker.local_rank, 1);
  EXPECT_EQ(worker.local_world_size, 3);
  EXPECT_EQ(worker.master_host, "gpu03");
  EXPECT_EQ(worker.master_port, 20000 + (1234567 + 2) % 10000);
  EXPECT_EQ(worker.job, "1234567");
}

Environment pod() {
  return {{"PET_NNODES", "3"},
          {"PET_NPROC_PER_NODE", "1"},
          {"PET_NODE_RANK", "2"},
          {"PET_MASTER_ADDR", "train-node-0-0.train"},
          {"PET_MASTER_PORT", "29511"}};
}

TEST(Environment, ReadsAPodOfTheKubernetesTrainer) {
  const auto worker = read_environment(pod());
  EXPECT_EQ(worker.launcher, Launcher::kKubernetes);
  EXPECT_EQ(worker.rank, 2);
  EXPECT_EQ(worker.world_size, 3);
  EXPECT_EQ(worker.local_rank, 0);
  EXPECT_EQ(worker.local_world_size, 1);
  EXPECT_EQ(worker.store_address(), "tls:train-node-0-0.train:29511");
  EXPECT_EQ(read_environment(with(pod(), {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}})).store_address(),
            "tls:h:1");
}

TEST(Environment, PrefersRanksToThePodsOfTheKubernetesTrainer) {
  const auto worker = read_environment(with(torchrun(), with(pod(), {{"PET_NPROC_PER_NODE", "2"}})));
  EXPECT_EQ(worker.launcher, Launcher::kExplicit);
  EXPECT_EQ(worker.rank, 3);
  EXPECT_EQ(worker.store_address(), "tls:node7:29400");
}

TEST(Environment, RejectsPodsThatAreNotOneWorkerEach) {
  for (const char* count : {"2", "auto", "gpu"}) {
    EXPECT_THAT(
        error_text(with(pod(), {{"PET_NPROC_PER_NODE", count}})),
        AllOf(HasSubstr(std::string("PET_NPROC_PER_NODE is ") + count), HasSubstr("torchrun --no-python")));
  }
  EXPECT_THAT(error_text(with(pod(), {{"PET_NNODES", "2:4"}})), HasSubstr("PET_NNODES is '2:4'"));
  EXPECT_THAT(error_text(with(pod(), {{"PET_MASTER_PORT", "x"}})), HasSubstr("PET_MASTER_PORT is 'x'"));
  EXPECT_THAT(error_text(with(pod(), {{"PET_MASTER_ADDR", ""}})), HasSubstr("MASTER_ADDR is not set"));
}

TEST(Environment, DistinguishesTheRestartsOfAJob) {
  const Environment first = with(torchrun(), {{"TORCHSPAN_RUN_ID", "a"}, {"TORCHELASTIC_ERROR_FILE", "/e"}});
  EXPECT_EQ(read_environment(first).job, "a");
  EXPECT_EQ(read_environment(first).error_file, "/e");
  const auto second =
      read_environment(with(first, {{"TORCHSPAN_RESTART_COUNT", "2"}, {"TORCHELASTIC_RESTART_COUNT", "1"}}));
  EXPECT_EQ(second.restart_count, 2);
  EXPECT_EQ(second.job, "a/attempt 2");
}

TEST(Environment, IgnoresSlurmInAnInteractiveShell) {
  const Environment shells[] = {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "6"}, {"SLURM_JOB_NAME", "bash"}},
                                // srun --pty bash
                                {{"SLURM_PROCID", "0"},
                                 {"SLURM_NTASKS", "1"},
                                 {"SLURM_JOB_NAME", "bash"},
                                 {"SLURM_STEP_ID", "0"},
                                 {"SLURM_STEP_NUM_TASKS", "1"}},
                                // The interactive step of salloc.
                                {{"SLURM_PROCID", "0"},
                                 {"SLURM_NTASKS", "6"},
                                 {"SLURM_JOB_NAME", "interactive"},
                                 {"SLURM_STEP_ID", "4294967290"},
                                 {"SLURM_STEP_NUM_TASKS", "1"}}};
  for (const Environment& shell : shells) {
    const auto worker = read_environment(shell);
    EXPECT_EQ(worker.world_size, 1);
    EXPECT_EQ(worker.launcher, Launcher::kNone);
  }
}

TEST(Environment, ReadsATaskThatSrunStartsFromAnInteractiveShell) {
  for (const char* job : {"interactive", "bash"}) {
    const auto worker = read_environment({{"SLURM_PROCID", "3"},
                                          {"SLURM_NTASKS", "4"},
                                          {"SLURM_LOCALID", "1"},
                                          {"SLURM_NODEID", "1"},
                                          {"SLURM_JOB_NAME", job},
                                          {"SLURM_JOB_ID", "77"},
                                          {"SLURM_STEP_ID", "0"},
                                          {"SLURM_STEP_NUM_TASKS", "4"},
                                          {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                                          {"SLURM_STEP_NODELIST", "gpu[03-04]"}});
    EXPECT_EQ(worker.launcher, Launcher::kSlurm);
    EXPECT_EQ(worker.rank, 3);
    EXPECT_EQ(worker.world_size, 4);
    EXPECT_EQ(worker.local_rank, 1);
    EXPECT_EQ(worker.master_host, "gpu03");
  }
}

TEST(Environment, ReportsThatABatchScriptNeedsSrun) {
  const Environment script = {{"SLURM_PROCID", "0"},
                              {"SLURM_NTASKS", "6"},
                              {"SLURM_JOB_ID", "77"},
                              {"SLURM_JOB_NAME", "train.sh"},
                              {"SLURM_JOB_NODELIST", "gpu[03-05]"}};
  EXPECT_THAT(error_text(script), AllOf(HasSubstr("batch script of Slurm job 77"), HasSubstr("6 tasks"),
                                        HasSubstr("srun ./program")));
  EXPECT_THAT(error_text(with(script, {{"SLURM_STEP_ID", "4294967291"}})), HasSubstr("srun"));
  EXPECT_EQ(error_text(with(script, {{"SLURM_STEP_ID", "0"}})), "");
  EXPECT_EQ(error_text(with(script, {{"SLURM_STEP_NUM_TASKS", "2"}})), "");
  EXPECT_EQ(error_text(with(script, {{"SLURM_NTASKS", "1"}})), "");
}

TEST(Environment, PrefersExplicitRanksThenOpenMpiThenPmiThenSlurm) {
  Environment all = {{"RANK", "1"},
                     {"WORLD_SIZE", "8"},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", "1"},
                     {"OMPI_COMM_WORLD_RANK", "2"},
                     {"OMPI_COMM_WORLD_SIZE", "8"},
                     {"PMI_RANK", "3"},
                     {"PMI_SIZE", "8"},
                     {"SLURM_PROCID", "4"},
                     {"SLURM_NTASKS", "8"}};
  EXPECT_EQ(read_environment(all).rank, 1);
  all.erase("RANK");
  EXPECT_EQ(read_environment(all).rank, 2);
  all.erase("OMPI_COMM_WORLD_RANK");
  EXPECT_EQ(read_environment(all).rank, 3);
  all.erase("PMI_RANK");
  EXPECT_EQ(read_environment(all).rank, 4);
}

TEST(Environment, ReadsSlurmNodeLists) {
  EXPECT_EQ(first_slurm_host("a[1-3,5]"), "a1");
  EXPECT_EQ(first_slurm_host("a[01-03]b,c"), "a01b");
  EXPECT_EQ(first_slurm_host("single"), "single");
  EXPECT_EQ(first_slurm_host("x,y"), "x");
  EXPECT_EQ(first_slurm_host("rack[2-3]node[07,09]"), "rack2node07");
  EXPECT_EQ(first_slurm_host("n[5]"), "n5");
  for (const char* bad : {"", "a[1-3", "a]1", ",b", "a[[1]]"}) {
    SCOPED_TRACE(bad);
    EXPECT_THROW(first_slurm_host(bad), Error);
  }
}

TEST(Environment, NamesTheVariableItsValueAndWhatIsExpected) {
  struct Row {
    Environment change;
    std::vector<std::string> words;
  };
  const std::vector<Row> rows = {
      {{{"RANK", "x"}}, {"RANK is 'x'", "whole number"}},
      {{{"RANK", "-1"}}, {"RANK is '-1'", "from 0"}},
      {{{"RANK", "3 "}}, {"RANK is '3 '"}},
      {{{"RANK", "4"}}, {"RANK is 4", "WORLD_SIZE is 4", "0 to 3"}},
      {{{"WORLD_SIZE", "-1"}}, {"WORLD_SIZE is '-1'", "from 1"}},
      {{{"WORLD_SIZE", "99999999999999999999"}}, {"WORLD_SIZE is '99999999999999999999'"}},
      {{{"WORLD_SIZE", ""}}, {"RANK is 3", "WORLD_SIZE is not set"}},
      {{{"RANK", ""}}, {"WORLD_SIZE is 4", "RANK is not set", "0 to 3"}},
      {{{"LOCAL_RANK", "2"}}, {"LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is 2"}},
      {{{"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", ""}}, {"LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is not set"}},
      {{{"LOCAL_WORLD_SIZE", "5"}}, {"LOCAL_WORLD_SIZE is 5", "WORLD_SIZE is 4"}},
      {{{"MASTER_ADDR", ""}}, {"MASTER_ADDR is not set", "rank 3 of 4"}},
      {{{"MASTER_PORT", ""}}, {"MASTER_PORT is not set", "rank 3 of 4"}},
      {{{"MASTER_PORT", "0"}}, {"MASTER_PORT is '0'", "1 to 65535"}},
      {{{"MASTER_PORT", "70000"}}, {"MASTER_PORT is '70000'"}},
      {{{"TORCHELASTIC_RESTART_COUNT", "-2"}}, {"TORCHELASTIC_RESTART_COUNT is '-2'"}},
      {{{"TORCHSPAN_NAME", "two words"}}, {"TORCHSPAN_NAME is 'two words'", "A-Z"}},
      {{{"TORCHSPAN_NAME", std::string(128, 'a')}}, {"TORCHSPAN_NAME", "128 characters", "127"}},
      {{{"TORCHSPAN_JOIN_TIMEOUT", "soon"}}, {"TORCHSPAN_JOIN_TIMEOUT is 'soon'"}},
  };
  for (const Row& row : rows) {
    const std::string text = error_text(with(torchrun(), row.change));
    SCOPED_TRACE(row.change.begin()->first + "=" + row.change.begin()->second);
    for (const auto& word : row.words) EXPECT_THAT(text, HasSubstr(word));
  }
  EXPECT_EQ(error_text(torchrun()), "");
}

TEST(Environment, RefusesAWorldSizeThatContradictsTheLauncher) {
  EXPECT_THAT(error_text({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"WORLD_SIZE", "3"}}),
              AllOf(HasSubstr("WORLD_SIZE is 3"), HasSubstr("OMPI_COMM_WORLD_SIZE is 2")));
  EXPECT_THAT(error_text({{"SLURM_PROCID", "0"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_NTASKS", "2"},
                          {"SLURM_TASKS_PER_NODE", "2(y3)"}}),
              HasSubstr("SLURM_TASKS_PER_NODE is '2(y3)'"));
  EXPECT_THAT(error_text({{"SLURM_PROCID", "0"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_NTASKS", "2"},
                          {"SLURM_NODEID", "2"},
                          {"SLURM_TASKS_PER_NODE", "1(x2)"}}),
              HasSubstr("SLURM_NODEID is 2"));
}

TEST(Environment, DerivesThePathsOfSecretsAndSockets) {
  const auto plain = read_environment(torchrun());
  EXPECT_EQ(plain.secret_file, "/home/.torchspan/secret");
  EXPECT_FALSE(plain.secret_named);
  EXPECT_EQ(plain.runtime_folder, "");
  EXPECT_EQ(plain.temporary_folder, "/tmp");
  const auto named = read_environment(with(torchrun(), {{"TORCHSPAN_SECRET_FILE", "s"},
                                                        {"XDG_RUNTIME_DIR", "/run/me"},
                                                        {"TMPDIR", "/var"},
                                                        {"TORCHSPAN_NAME", "trainer"},
                                                        {"TORCHSPAN_JOIN_TIMEOUT", "5"}}));
  EXPECT_EQ(named.secret_file, "s");
  EXPECT_TRUE(named.secret_named);
  EXPECT_EQ(named.runtime_folder, "/run/me/torchspan");
  EXPECT_EQ(named.temporary_folder, "/var");
  EXPECT_EQ(named.name, "trainer");
  EXPECT_EQ(named.join_timeout, std::chrono::seconds(5));
  EXPECT_EQ(read_environment({{"TORCHSPAN_RUNTIME_DIR", "/a"}, {"XDG_RUNTIME_DIR", "/b"}}).runtime_folder,
            "/a");
}

TEST(Environment, OfThisProcessHasItsVariables) {
  ASSERT_EQ(setenv("TORCHSPAN_TEST_VARIABLE", "a=b", 1), 0);
  EXPECT_EQ(process_environment().at("TORCHSPAN_TEST_VARIABLE"), "a=b");
  unsetenv("TORCHSPAN_TEST_VARIABLE");
}

}  // namespace
}  // namespace torchspan::rendezvous::environment_test
