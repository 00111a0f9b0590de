"""The placement of weights on devices: sharding strategies, meshes and shardings.

``strategy`` is MAX's ``ShardingStrategy``; ``mesh`` makes device meshes; ``specs`` decides which
axis of a weight is split over which axis of a mesh (a ``PartitionSpec``), and says why if none
is; ``device_major`` is the order of rows that tensor parallelism of fused weights needs;
``arrays`` puts arrays on the devices.
"""
