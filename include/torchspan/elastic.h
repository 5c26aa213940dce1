#pragma once
// Data-parallel training that goes on without ranks that die, in the same processes. See docs/elastic.md.
#include <torchspan/elastic/recovering_trainer.h>
#include <torchspan/elastic/trainer.h>
