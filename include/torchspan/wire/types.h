#pragma once
// Every type that travels without help from its user.
#include <torchspan/wire/containers.h>
#include <torchspan/wire/errors.h>
#include <torchspan/wire/torch_types.h>
