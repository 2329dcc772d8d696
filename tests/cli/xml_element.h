#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::testing {

struct XmlElement {
  std::string name{};
  std::map<std::string, std::string> attributes{};
  std::vector<XmlElement> children{};
  std::string text{};  // of its own, without its children's

  // This one and all below it that are `called` so, in the document's order.
  std::vector<const XmlElement*> all(std::string_view called) const;
};

// The root of a document in the plain part of XML 1.0: a declaration, elements,
// attributes, text, the five entities; no comments, no DTD. Throws
// std::runtime_error with the place of what is not well-formed.
XmlElement parse_xml(std::string_view text);

}  // namespace lockstep::testing
