#pragma once
// Training that continues when ranks die, in the processes of the other ranks. See docs/elastic.md.
#include <torchspan/elastic/recovering_trainer.h>
#include <torchspan/elastic/trainer.h>
