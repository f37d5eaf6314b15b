//! The rules as a table.

use crate::api::RuleStatus;
use crate::units::Size;

/// The rules in their order, with the requests that each has decided on.
#[must_use]
pub fn rules(all: &[RuleStatus]) -> String {
    if all.is_empty() {
        return "no rules; `forebay help rules` tells how to write them\n".to_owned();
    }
    let mut out = format!("{:>12}  {:>9}  RULE\n", "REQUESTS", "BYTES");
    for RuleStatus { rule, requests, bytes } in all {
        out += &format!("{requests:>12}  {:>9}  {rule}\n", Size(*bytes).to_string());
    }
    out
}
