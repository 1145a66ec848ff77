//! Kubernetes' quantities: `250m`, `1.5Gi`, `2e3`.
//!
//! Responsible for: reading them as exact numbers ([`Amount`]), rounding them as upstream does, and printing numbers in
//! upstream's canonical form ([`binary`], [`decimal`]).
//!
//! Deliberately does not know: what is counted. Whether an amount is a limit, and what is done about a negative one, is
//! for whoever asks.
//!
//! Start reading at [`Amount::parse`].

mod amount;
mod print;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

pub use amount::Amount;
pub use print::{binary, decimal};

/// Whole units of a quantity, such as bytes, rounded up; `None` if it is no number, or negative.
pub fn bytes(quantity: &Quantity) -> Option<u64> {
    u64::try_from(Amount::of(quantity)?.value()).ok()
}
