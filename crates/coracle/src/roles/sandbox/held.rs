//! Holds on the layers of a pod's images, so that garbage collection does not remove them while the pod runs.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;

use images::{LayerError, LayerHold, Layers};

/// Holds layers until it is dropped. This includes layers of an image that was pulled again under the same name since, because
/// earlier containers still run on them.
pub struct HeldLayers {
    dir: PathBuf,
    held: RefCell<HashMap<PathBuf, LayerHold>>,
}

impl HeldLayers {
    /// Holds on layers in the directory `dir`.
    pub fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            held: RefCell::default(),
        }
    }

    /// Keeps layers from being removed. May wait for a process that is removing one.
    pub async fn hold(&self, layers: &[PathBuf]) -> Result<(), String> {
        let dir = self.dir.clone();
        let new: Vec<PathBuf> = {
            let held = self.held.borrow();
            let new = layers.iter().filter(|layer| !held.contains_key(*layer));
            new.cloned().collect()
        };
        let hold = move || -> Result<Vec<_>, LayerError> {
            let all = Layers::open(&dir)?;
            let hold = |layer: PathBuf| Ok((all.hold(std::slice::from_ref(&layer))?, layer));
            new.into_iter().map(hold).collect()
        };
        let held = tokio::task::spawn_blocking(hold)
            .await
            .map_err(|error| error.to_string())?
            .map_err(|error| images::error_chain(&error))?;
        let held = held.into_iter().map(|(held, layer)| (layer, held));
        self.held.borrow_mut().extend(held);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn layers_of_a_replaced_image_stay() {
        let home = tempfile::tempdir().unwrap();
        let layers = Layers::open(home.path()).unwrap();
        let [base, old, new] = ["0", "1", "2"].map(|name| home.path().join(name.repeat(32)));
        for layer in [&base, &old, &new] {
            std::fs::create_dir(layer).unwrap();
        }
        let held = HeldLayers::new(home.path().to_owned());
        held.hold(&[base.clone(), old.clone()]).await.unwrap();
        held.hold(&[base.clone(), new.clone()]).await.unwrap();
        assert_eq!(held.held.borrow().len(), 3);
        assert_eq!(layers.prune(Duration::ZERO).unwrap(), 0);
        assert!(
            held.hold(&[home.path().join("3".repeat(32))])
                .await
                .is_err()
        );
        drop(held);
        assert_eq!(layers.prune(Duration::ZERO).unwrap(), 3);
    }
}
