//! Holds on the layers of images that are in use, so that garbage collection does not remove them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;

use super::{LayerError, LayerHold, Layers, io_error};

/// Holds layers until it is dropped. This includes layers of an image that was pulled again under the same name since, because
/// earlier containers still run on them.
#[derive(Debug)]
pub struct LayerHolds {
    dir: PathBuf,
    holds: RefCell<HashMap<PathBuf, LayerHold>>,
}

impl LayerHolds {
    /// No holds yet, on layers in the directory `dir`.
    pub fn new(dir: PathBuf) -> LayerHolds {
        LayerHolds {
            dir,
            holds: RefCell::default(),
        }
    }

    /// Keeps layers from being removed. May wait for a process that is removing one.
    pub async fn hold(&self, layers: &[PathBuf]) -> Result<(), LayerError> {
        let new: Vec<PathBuf> = {
            let holds = self.holds.borrow();
            let new = layers.iter().filter(|layer| !holds.contains_key(*layer));
            new.cloned().collect()
        };
        let dir = self.dir.clone();
        let hold = move || -> Result<Vec<_>, LayerError> {
            let all = Layers::open(&dir)?;
            let hold = |layer: PathBuf| Ok((all.hold(std::slice::from_ref(&layer))?, layer));
            new.into_iter().map(hold).collect()
        };
        let held = tokio::task::spawn_blocking(hold).await;
        let held = held.map_err(|error| io_error("hold", &self.dir)(io::Error::other(error)))??;
        let held = held.into_iter().map(|(hold, layer)| (layer, hold));
        self.holds.borrow_mut().extend(held);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn layers_of_replaced_image_are_kept() {
        let home = tempfile::tempdir().unwrap();
        let layers = Layers::open(home.path()).unwrap();
        let [base, old, new] = ["0", "1", "2"].map(|name| home.path().join(name.repeat(32)));
        for layer in [&base, &old, &new] {
            std::fs::create_dir(layer).unwrap();
        }
        let holds = LayerHolds::new(home.path().to_owned());
        holds.hold(&[base.clone(), old.clone()]).await.unwrap();
        holds.hold(&[base.clone(), new.clone()]).await.unwrap();
        assert_eq!(holds.holds.borrow().len(), 3);
        assert_eq!(layers.prune(Duration::ZERO).unwrap(), 0);
        assert!(
            holds
                .hold(&[home.path().join("3".repeat(32))])
                .await
                .is_err()
        );
        drop(holds);
        assert_eq!(layers.prune(Duration::ZERO).unwrap(), 3);
    }
}
