#include "core/api/xml.h"

#include <gtest/gtest.h>

namespace torchspan::xml_test {
namespace {

TEST(EscapeXml, LeavesNoMarkup) { EXPECT_EQ(escape_xml("a<b c=\"2\">&amp;"), "a&lt;b c=\"2\"&gt;&amp;amp;"); }

TEST(EscapeXml, DropsControlCharactersAndKeepsUtf8) { EXPECT_EQ(escape_xml("\x01ö\n…"), "ö…"); }

}  // namespace
}  // namespace torchspan::xml_test
