#include "core/api/json_fields.h"

#include <gtest/gtest.h>

namespace torchspan::json_fields_test {
namespace {

using nlohmann::json;

TEST(JsonFields, ReturnsFieldsOfTheirType) {
  const json object = {
      {"text", "a\nb"}, {"flag", true}, {"number", -3}, {"large", std::uint64_t{1} << 63}, {"half", 0.5}};
  EXPECT_EQ(json_field<std::string>(object, "text"), "a\nb");
  EXPECT_EQ(json_field<bool>(object, "flag"), true);
  EXPECT_EQ(json_field<int>(object, "number"), -3);
  EXPECT_EQ(json_field<std::uint64_t>(object, "large"), std::uint64_t{1} << 63);
  EXPECT_EQ(json_field<double>(object, "half"), 0.5);
  EXPECT_EQ(json_field<double>(object, "number"), -3.);
}

TEST(JsonFields, ReturnsNothingForMissingFieldsOtherTypesAndNumbersThatDoNotFit) {
  const json object = {{"text", "7"}, {"number", -3}, {"large", std::uint64_t{1} << 63}, {"half", 0.5}};
  EXPECT_FALSE(json_field<int>(object, "other"));
  EXPECT_FALSE(json_field<int>(json::array(), "number"));
  EXPECT_FALSE(json_field<int>(object, "text"));
  EXPECT_FALSE(json_field<bool>(object, "number"));
  EXPECT_FALSE(json_field<std::string>(object, "number"));
  EXPECT_FALSE(json_field<int>(object, "half"));
  EXPECT_FALSE(json_field<std::uint64_t>(object, "number"));
  EXPECT_FALSE(json_field<std::int64_t>(object, "large"));
}

TEST(JsonFields, NoteThatARequiredFieldIsMissingOrWrong) {
  const json object = {{"number", 3}, {"list", {1, 2}}};
  JsonFields fields(object);
  EXPECT_EQ(fields.require("number", 1, 3), 3);
  EXPECT_EQ(fields.require_list("list", 2).size(), 2u);
  EXPECT_TRUE(fields.good());
  const auto is_good = [&](const json& value, const auto& read) {
    JsonFields checked(value);
    read(checked);
    return checked.good();
  };
  EXPECT_FALSE(is_good(object, [](JsonFields& checked) { EXPECT_EQ(checked.require("number", 0, 2), 0); }));
  EXPECT_FALSE(
      is_good(object, [](JsonFields& checked) { EXPECT_EQ(checked.require<bool>("number"), false); }));
  EXPECT_FALSE(
      is_good(object, [](JsonFields& checked) { EXPECT_TRUE(checked.require_list("list", 1).empty()); }));
  EXPECT_FALSE(
      is_good(object, [](JsonFields& checked) { EXPECT_TRUE(checked.require_list("number", 9).empty()); }));
  EXPECT_FALSE(
      is_good("text", [](JsonFields& checked) { EXPECT_EQ(checked.require<std::string>("a"), ""); }));
}

}  // namespace
}  // namespace torchspan::json_fields_test
