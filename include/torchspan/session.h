#pragma once
// Session: one worker with everything that it needs.
#include <torchspan/session/session.h>
