//! Limits on the size of an image: few compressed bytes can expand to many.

use anyhow::{Context, bail};
use images::ImageLimits;

use super::amount;

/// Overrides the limits, as in `bytes=128G,files=8000000`.
const IMAGE_LIMITS_VARIABLE: &str = "CORACLE_IMAGE_LIMITS";

/// The limits from the environment, or the defaults.
pub fn from_environment() -> anyhow::Result<ImageLimits> {
    parse(&std::env::var(IMAGE_LIMITS_VARIABLE).unwrap_or_default())
}

fn parse(text: &str) -> anyhow::Result<ImageLimits> {
    let mut limits = ImageLimits::default();
    for (part, name, value) in super::pairs(text) {
        let malformed =
            || format!("{IMAGE_LIMITS_VARIABLE}: {part:?} is not like bytes=128G or files=8000000");
        match name {
            "bytes" => {
                let bytes = amount::bytes(value).map_err(anyhow::Error::msg);
                limits.bytes = bytes.with_context(malformed)?;
            }
            "files" => limits.entries = value.parse().with_context(malformed)?,
            other => bail!("{IMAGE_LIMITS_VARIABLE} has no {other:?}"),
        }
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_limits() {
        assert_eq!(parse("").unwrap(), ImageLimits::default());
        let both = parse("bytes=2M,files=7").unwrap();
        assert_eq!((both.bytes, both.entries), (2 << 20, 7));
        let one = parse("files=7").unwrap();
        assert_eq!(one.bytes, ImageLimits::default().bytes);
        for bad in ["bytes", "bytes=many", "files=-1", "files=2K", "size=1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
