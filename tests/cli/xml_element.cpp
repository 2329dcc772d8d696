#include "tests/cli/xml_element.h"

#include <cctype>
#include <stdexcept>

namespace lockstep::internal::testing {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  XmlElement document() {
    if (text_.starts_with("<?xml ")) {
      at_ = text_.find("?>");
      require(at_ != std::string_view::npos, "an end of the declaration");
      at_ += 2;
    }
    skip_space();
    XmlElement root = element();
    skip_space();
    require(at_ == text_.size(), "the end");
    return root;
  }

 private:
  void require(bool holds, const std::string& what) const {
    if (holds) return;
    throw std::runtime_error("no " + what + " at byte " + std::to_string(at_));
  }
  bool takes(std::string_view what) {
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  void expect(std::string_view what) {
    require(takes(what), std::string(what));
  }
  void skip_space() {
    while (at_ < text_.size() && isspace(text_[at_])) ++at_;
  }
  std::string name() {
    const size_t begin = at_;
    while (at_ < text_.size() && (isalnum(text_[at_]) || text_[at_] == '-')) {
      ++at_;
    }
    require(at_ > begin && isalpha(text_[begin]), "name");
    return std::string(text_.substr(begin, at_ - begin));
  }
  // Returns the text up to one of `ends`, which is not consumed.
  std::string characters(std::string_view ends) {
    std::string result;
    while (true) {
      require(at_ < text_.size(), "end of the text");
      if (ends.find(text_[at_]) != std::string_view::npos) return result;
      require(text_[at_] != '<', "character that may stand here");
      result += text_[at_] == '&' ? entity() : text_[at_++];
    }
  }
  char entity() {
    for (const auto& [word, c] : {std::pair("&amp;", '&'),
                                  {"&lt;", '<'},
                                  {"&gt;", '>'},
                                  {"&quot;", '"'},
                                  {"&apos;", '\''}}) {
      if (takes(word)) return c;
    }
    require(false, "entity that is known");
    return 0;
  }
  XmlElement element() {
    expect("<");
    XmlElement one{.name = name()};
    while (true) {
      const size_t before = at_;
      skip_space();
      if (takes("/>")) return one;
      if (takes(">")) break;
      require(at_ > before, "space before an attribute");
      const std::string key = name();
      expect("=\"");
      require(one.attributes.emplace(key, characters("\"")).second,
              "second attribute allowed");
      expect("\"");
    }
    while (!takes("</")) {
      if (text_.substr(at_).starts_with("<")) {
        one.children.push_back(element());
      } else {
        one.text += characters("<");
      }
    }
    require(name() == one.name, "end of " + one.name);
    skip_space();
    expect(">");
    return one;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

std::vector<const XmlElement*> XmlElement::all(std::string_view called) const {
  std::vector<const XmlElement*> found;
  if (name == called) found.push_back(this);
  for (const auto& child : children) {
    const auto below = child.all(called);
    found.insert(found.end(), below.begin(), below.end());
  }
  return found;
}

XmlElement parse_xml(std::string_view text) { return Parser(text).document(); }

}  // namespace lockstep::internal::testing
