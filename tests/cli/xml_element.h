#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::internal::testing {

struct XmlElement {
  std::string name{};
  std::map<std::string, std::string> attributes{};
  std::vector<XmlElement> children{};
  std::string text{};  // its own text, without its children's

  // Returns this element and all below it whose name is `called`, in the
  // document's order.
  std::vector<const XmlElement*> all(std::string_view called) const;
};

// Returns the root of a document in the plain part of XML 1.0: a declaration,
// elements, attributes, text, the five entities; no comments, no DTD. Throws
// std::runtime_error that says where the text is not well-formed.
XmlElement parse_xml(std::string_view text);

}  // namespace lockstep::internal::testing
