#include "core/api/xml.h"

#include <gtest/gtest.h>

namespace torchspan::xml_test {
namespace {

TEST(EscapeXml, LeavesNoMarkup) {
  EXPECT_EQ(escape_xml("a<b a='1' c=\"2\">&amp;"), "a&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;amp;");
}

TEST(EscapeXml, DropsControlCharactersAndKeepsUtf8) { EXPECT_EQ(escape_xml("\x01ö\n…"), "ö…"); }

}  // namespace
}  // namespace torchspan::xml_test
