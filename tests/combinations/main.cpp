#include "tests/support/cluster_main.h"

int main(int argc, char** argv) { return torchspan::testing::cluster_main(argc, argv); }
