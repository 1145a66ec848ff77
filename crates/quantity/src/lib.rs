//! Kubernetes quantities: `250m`, `1.5Gi`, `2e3`.
//!
//! Responsible for: parsing them as exact numbers ([`Amount`]), rounding them as upstream does, and printing numbers in
//! upstream's canonical form ([`binary`], [`decimal`]).
//!
//! Deliberately does not know: units and meanings. The caller decides whether an amount is a limit, and how to treat a negative one.
//!
//! Start reading at [`Amount::parse`].

#![warn(unused_crate_dependencies)]

mod amount;
mod print;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

pub use amount::Amount;
pub use print::{binary, decimal};

/// Whole units of a quantity, such as bytes, rounded up; `None` if it is not a number or negative.
pub fn bytes(quantity: &Quantity) -> Option<u64> {
    u64::try_from(Amount::of(quantity)?.value()).ok()
}
