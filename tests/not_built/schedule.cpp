#include <torchspan/schedule/schedule.h>

using namespace torchspan::schedule;

#if USE == 1
const Table kTable = gpipe({.ranks = 2, .micro_batches = 4});
#elif USE == 2
const Table kTable = zero_bubble({.ranks = 2, .micro_batches = 4});
#elif USE == 3
const Table kTable = read_csv("0F0,0B0");
#elif USE == 4
void check(const Table& table) { validate(table); }
#elif USE == 5
Simulation run(const Table& table) { return simulate(table, {Costs{}}); }
#elif USE == 6
std::string show(const Simulation& simulation) { return draw(simulation); }
#endif
