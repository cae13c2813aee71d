"""How much DRAM a stream of look-ups needs: samples of it, simulated caches, drives, steps and prices."""
