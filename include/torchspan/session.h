#pragma once
// Session: one worker and everything it runs on.
#include <torchspan/session/session.h>
